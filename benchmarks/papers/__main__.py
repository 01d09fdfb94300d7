"""Run the claims, or those that are named, and write their pages; each goes on where it was stopped.

python benchmarks/papers                 # all
python benchmarks/papers parity cost
python benchmarks/papers --page          # nothing but pictures and pages, from what is finished
"""

import os
import sys

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import ablation
import context
import copying
import cost
import early_exit
import facts
import forgetting
import groups
import interference
import length
import levels
import mosaics
import parity
import pasts
import positions
import reach
import recall
import regression
import swaps
from claim import write
from page import texts

CLAIMS = {
    module.CLAIM.name: module.CLAIM
    for module in (
        interference,
        forgetting,
        reach,
        cost,
        parity,
        groups,
        recall,
        copying,
        mosaics,
        levels,
        context,
        regression,
        facts,
        swaps,
        length,
        positions,
        pasts,
        ablation,
        early_exit,
    )
}


def main() -> None:
    """Say how long it takes, then run."""
    names = [name for name in sys.argv[1:] if name != "--page"]
    if unknown := set(names) - set(CLAIMS):
        sys.exit(f"claims must be among {', '.join(CLAIMS)}, got {', '.join(sorted(unknown))}")
    chosen = [] if "--page" in sys.argv else [CLAIMS[name] for name in names or CLAIMS]
    left = {claim.name: claim.minutes_left(claim.rows()) for claim in chosen}
    print(
        "minutes of CPU time left: " + ", ".join(f"{name} {x:.1f}" for name, x in left.items()),
        flush=True,
    )
    for claim in chosen:
        rows = claim.go_on()
        print(f"{claim.name}: {': '.join(claim.verdict(rows))}", flush=True)
        write_page()
    if not chosen:
        for claim in CLAIMS.values():
            if rows := claim.rows():
                claim.picture(rows)
        write_page()


def write_page() -> None:
    """Write docs/research/claims.md and the pages of its topics."""
    for file, text in texts(CLAIMS.values()).items():
        write(file, text)


if __name__ == "__main__":
    main()
