"""Check a layer (B, L, D) -> (B, L, D) for the faults that such layers have in practice.

python -m tools conform MODULE:CLASS|FILE.py:CLASS [--causal] [--init dim=64,num_heads=4] [--adapter FILE.py]

Exit code 1 means that a check fails, 2 that the layer could not be constructed or called.
"""

from __future__ import annotations

from lion.config import ConfigError
from lion.files import save_json
from tools import options
from tools.cli import check_folder
from tools.conform.report import as_json, as_text
from tools.conform.suite import CHECKS, COMPILE, FAILS, examine
from tools.conform.target import open_subject


def main(argv: list[str]) -> int:
    args = options.read("conform", argv)
    if args.json:
        check_folder("--json", args.json.parent)
        if args.json.is_dir():
            raise ConfigError(f"--json: {args.json} is a folder")
    subject = open_subject(args.layer, args.init, dim=args.dim, causal=args.causal, adapter=args.adapter)
    names = [name for name in CHECKS if not (args.eager and name == COMPILE)]
    results = examine(subject, names)
    print(as_text(subject, results))
    if args.json:
        save_json(args.json, as_json(subject, results))
    return int(any(result.status == FAILS for result in results))
