"""`lz demo`: a tour of LayerZero on this machine."""
