"""Steps within more and more memory: ``python -m tests.benchmarks.budgets``.

Every model is planned within 95, 90, ... 30 % of what its fastest plan holds, in one microbatch, on
one and on two devices, without host memory and with it over links of several speeds. Told is how
many of these plans are slower than one within less memory, the worst of them, and seconds of the
processor a plan. Names of models as arguments run those alone; ``--every 25`` takes budgets that
are 2.5 % apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

from autopar import hint
from autopar.capture import capture_step
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.oracles.budgets import slower, within_parts
from tests.oracles.hosts import hosted
from tests.oracles.models import Built, bert, gpt2, llama, mlp, t5

MODELS: Mapping[str, Callable[[], Built]] = {
    "mlp": lambda: mlp(64),
    "gpt2": lambda: gpt2(layers=4, batch=8),
    "llama": llama,
    "bert": bert,
    "t5": t5,
}
LINKS = (0.0, 1e9, 12e9, 75e9)
LEAST, MOST = 300, 1000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--every", type=int, default=50, help="thousandths between budgets")
    given = arguments.parse_args()
    parts = range(MOST - given.every, LEAST - 1, -given.every)
    print(f"{'model':8}{'ranks':>6}{'host link':>12}{'plans':>7}{'slower':>8}  worst")
    for name in given.models:
        analysis = analyse(capture_step(*MODELS[name](), grad=True).graph)
        for ranks in given.ranks:
            for link in LINKS:
                cluster = hosted(ranks, link) if link else Cluster.local(ranks)
                start = time.process_time()
                found = within_parts(analysis, cluster, parts, hint.microbatches(1))
                each_s = (time.process_time() - start) / len(found)
                bad = sorted(slower(found), key=lambda own: -own.by)
                where = f"{link / 1e9:g} GB/s" if link else "none"
                worst = "-"
                if bad:
                    own = bad[0]
                    worst = f"{own.by:.3%} at {own.part / 10:g} %, beside {own.other / 10:g} %"
                row = f"{name:8}{ranks:6}{where:>12}{len(found):7}{len(bad):8}"
                print(f"{row}  {worst}; {each_s:.1f} s a plan", flush=True)


if __name__ == "__main__":
    main()
