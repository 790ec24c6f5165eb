"""Small files of the official GLUE layouts; every sentence is written here."""

from pathlib import Path

HEADERS = {
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse"
    "\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "qnli": "index\tquestion\tsentence\tlabel",
    "sst2": "sentence\tlabel",
    "cola": "",
    "rte": "index\tsentence1\tsentence2\tlabel",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
}
FOLDERS = {
    "mnli": "MNLI", "qqp": "QQP", "qnli": "QNLI", "sst2": "SST-2", "cola": "CoLA", "rte": "RTE", "mrpc": "MRPC",
    "stsb": "STS-B",
}  # fmt: skip

# (first text, second text, label as the official file writes it, target)
ROWS: dict[str, list[tuple[str, str, str, float]]] = {
    "mnli": [
        ("The ferry leaves at dawn.", "A boat departs early.", "entailment", 0),
        ("The ferry leaves at dawn.", "The ferry is red.", "neutral", 1),
        ("Nobody came.", "The hall was full.", "contradiction", 2),
    ],
    "qqp": [
        ("How do I dry herbs?", "What is the way to dry herbs?", "1", 1),
        ("How do I dry herbs?", "Where do herbs grow?", "0", 0),
    ],
    "qnli": [
        ("Who painted the gate?", "The gate was painted by Ada.", "entailment", 0),
        ("Who painted the gate?", "It is two metres high.", "not_entailment", 1),
    ],
    "sst2": [
        ("a warm and clever little film ", "", "1", 1),
        ("two hours of nothing", "", "0", 0),
        ('she calls it " fine', "", "1", 1),  # a lone quotation mark is a character like any other
    ],
    "cola": [("The cat that I fed slept.", "", "1", 1), ("The cat that I fed it slept.", "", "0", 0)],
    "rte": [
        ("Lund lies north of Malmö.", "Malmö lies south of Lund.", "entailment", 0),
        ("Lund lies north of Malmö.", "Lund is a port.", "not_entailment", 1),
    ],
    "mrpc": [
        ('He said " no " twice .', "Twice he said no .", "1", 1),
        ("The bridge opened in May .", "The bridge closed in May .", "0", 0),
    ],
    "stsb": [
        ("A man plays a flute.", "A man is playing the flute.", "5.000", 5),
        ("A dog runs.", "A pot boils.", "0.250", 0.25),
        ("A dog runs.", "An animal runs.", "3.2", 3.2),
    ],
}


LINES = {
    "mnli": "{index}\t1\t1n\tfiction\t(a)\t(b)\t(A)\t(B)\t{first}\t{second}\t{label}\t{label}",
    "qqp": "{index}\t1\t2\t{first}\t{second}\t{label}",
    "qnli": "{index}\t{first}\t{second}\t{label}",
    "sst2": "{first}\t{label}",
    "cola": "gj04\t{label}\t*\t{first}",
    "rte": "{index}\t{first}\t{second}\t{label}",
    "mrpc": "{label}\t10\t11\t{first}\t{second}",
    "stsb": "{index}\tmain\tf\t2012\t5\tnone\tnone\t{first}\t{second}\t{label}",
}
"""A row as the official file of a task has it."""


def content(task: str, copies: int = 1) -> str:
    rows = enumerate(ROWS[task] * copies)
    lines = [LINES[task].format(index=i, first=a, second=b, label=label) for i, (a, b, label, _) in rows]
    return "".join(f"{text}\n" for text in ([HEADERS[task]] if HEADERS[task] else []) + lines)


def write_glue(root: Path, task: str, copies: int = 1) -> Path:
    """Write the training and development files of a task under its official folder; return that folder."""
    folder = root / FOLDERS[task]
    folder.mkdir(parents=True)
    stems = ("train", "dev_matched", "dev_mismatched") if task == "mnli" else ("train", "dev")
    for stem in stems:
        (folder / f"{stem}.tsv").write_text(content(task, copies), encoding="utf-8")
    return folder
