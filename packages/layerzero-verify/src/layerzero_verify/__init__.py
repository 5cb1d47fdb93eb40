"""Is it right? The parity ladder: kernels, a layer, its stages, whole models, training; and what each rung found.

    report = lz.verify(lane="quick")            # or: lz verify --lane quick
    print(report.verdict.text)

A rung that fails while all below it pass is an integration fault: the parts are right, what joins them is not.
"""
