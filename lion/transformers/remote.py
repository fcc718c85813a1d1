"""The code that saved folders contain, with which the Auto classes load them by `trust_remote_code=True`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from lion.files import save_text

FILE = "modeling_lion.py"
AUTO = {  # our class, by Auto class
    "AutoConfig": "LionConfig",
    "AutoModel": "LionModel",
    "AutoModelForMaskedLM": "LionForMaskedLM",
    "AutoModelForSequenceClassification": "LionForSequenceClassification",
    "AutoModelForTokenClassification": "LionForTokenClassification",
    "AutoModelForCausalLM": "LionForCausalLM",
    "AutoModelForImageClassification": "LionForImageClassification",
}
AUTO_MAP = {auto: f"{FILE.removesuffix('.py')}.{kind}" for auto, kind in AUTO.items()}
# transformers asks to install every import outside of `try` by its name, and "lion" on the index is another project
CODE = f'''"""Models of the package lion; in a clone of it: pip install '.[transformers]'"""

try:
    from lion.transformers import {", ".join(AUTO.values())}
except ModuleNotFoundError as error:  # other errors, as of an old transformers, are of the package itself
    raise ImportError("this model needs the package lion, in a clone of it: pip install '.[transformers]'") from error
'''


def write_code(folder: str | PathLike[str]) -> None:
    """Write the code into a folder, which is made if it does not exist."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_text(Path(folder) / FILE, CODE)
