"""SQuAD 2.0: files, windows, answers, the official score."""
