"""Tables, curves and style of runs. No torch."""
