"""No test asks the network: what would wait for the Hub is refused at once, in this process and in those it starts."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
