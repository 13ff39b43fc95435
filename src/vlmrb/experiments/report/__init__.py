"""`vlmrb report`: the runs of sweeps, kept results and calibrations beside the paper's figures, as one page."""
