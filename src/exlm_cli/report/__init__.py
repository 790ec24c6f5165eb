"""Tables, curves, style and cost of runs. No torch."""
