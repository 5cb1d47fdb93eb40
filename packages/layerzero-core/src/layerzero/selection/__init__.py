"""Selection: a pure function from a Context and a World to a Decision."""
