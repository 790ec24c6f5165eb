"""What a training records: its beginning and end, the numbers of its steps, what token frequencies know, traces."""
