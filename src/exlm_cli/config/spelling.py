"""How a key of a recipe is given on the command line, for hints."""


def how_to_set(key: str, value: str, option: str | None = None) -> str:
    """Return how a key is given to the command that has it, and to one that runs a grid or a sweep.

    Args:
        key: Of a pre-training or a fine-tuning recipe, like `data.column` or `task.data_dir`.
        value: Stands for what is given, like `NAME`.
        option: What the command has for it besides `--set`, with its value: `--data-dir DIR`.
    """
    section = "finetune" if key.startswith("task.") else "pretrain"
    alone = f"--set {key}={value}" if option is None else option
    return f"`{alone}` (in a grid or sweep `--set {section}.{key}={value}`)"
