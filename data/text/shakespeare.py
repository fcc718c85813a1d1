"""Tiny Shakespeare by character, as in nanoGPT."""

from __future__ import annotations

from dataclasses import dataclass, replace

from data.folders import data_root, user_path
from data.text.text import LAYOUTS, SPLITTINGS, Text, TextConfig
from lion.config import ConfigError, setting
from lion.samples.text import TextInfo

CHARACTERS, TRAIN = 65, 1_003_855  # distinct characters of the text, and characters of its first nine tenths
FINGERPRINT = "7bf421ab48463b87ed6086fe1042e369d708138245b0798ff9157a314cd412a5"


@dataclass
class TinyShakespeareConfig(TextConfig):
    """Settings of Tiny Shakespeare: the last tenth is held out.

    A window of 65 characters is a context of 64 and the character after it.
    """

    name: str = "tiny_shakespeare"
    tokenizer: str = setting("characters", free=True)
    length: int = setting(65, min=2, max=2**20)
    pack: str = setting("windows", choices=LAYOUTS)
    split: str = setting("tail", choices=SPLITTINGS)
    val_split: float = setting(0.1, above=0, max=0.5)


class TinyShakespeare(Text):
    """Tiny Shakespeare, one file: `data.path`, or by default `tinyshakespeare/input.txt` in the data root."""

    Config = TinyShakespeareConfig

    def __init__(self, config: TinyShakespeareConfig) -> None:
        path = config.path or str(data_root() / "tinyshakespeare" / "input.txt")
        super().__init__(replace(config, path=path))

    def prepare(self) -> None:
        self.check_file()
        super().prepare()

    def check_file(self) -> None:
        """Check that the file exists.

        Raises:
            ConfigError: The file is missing.
        """
        if not user_path(self.config.path).exists():
            raise ConfigError(
                f"data set 'tiny_shakespeare': no file {self.config.path} (set data.path=FILE or $LION_DATA); "
                f"download it from github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"
            )

    def published(self) -> tuple[TextInfo, int] | None:
        if (self.config.tokenizer, self.config.split, self.config.val_split) != ("characters", "tail", 0.1):
            return None
        length = self.config.length
        return TextInfo(CHARACTERS, length, "characters", FINGERPRINT), TRAIN - length + 1
