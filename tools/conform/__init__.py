"""Check a layer (B, L, D) -> (B, L, D) for the faults that such layers have in practice.

python -m tools conform MODULE:CLASS|FILE.py:CLASS [--causal] [--init dim=64,num_heads=4] [--adapter FILE.py]

Exit code 1 means that a check fails, 2 that the layer could not be constructed or called.
"""

from __future__ import annotations

from pathlib import Path

from lion.config import ConfigError
from lion.files import save_json
from tools.cli import Parser, check_folder, count
from tools.conform.report import as_json, as_text
from tools.conform.suite import CHECKS, COMPILE, FAILS, examine
from tools.conform.target import open_subject


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh conform", description=__doc__.splitlines()[0])
    parser.add_argument("layer", help="MODULE:CLASS or FILE.py:CLASS; a function that returns a layer will do")
    parser.add_argument("--causal", action="store_true", help="also check that no output depends on later tokens")
    parser.add_argument("--init", default="", metavar="NAME=VALUE,..", help="arguments of the constructor")
    parser.add_argument("--dim", type=count, help="width D of the tokens, where it cannot be inferred")
    parser.add_argument(
        "--adapter", type=Path, metavar="FILE.py", help="file with `adapt(layer)`: how to call the layer"
    )
    parser.add_argument("--eager", action="store_true", help="leave out the check that compiles, the longest one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measured values and limits to this file")
    args = parser.parse_args(argv)
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
