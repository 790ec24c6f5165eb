"""Tables and figures of sweeps, of Repeated MLM and of the paper."""
