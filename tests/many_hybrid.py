import sys

sys.path.insert(0, "tests")
from concurrent.futures import ProcessPoolExecutor
from pensieve.engine.cache import tails

tails.LEAST_SPAN = 8
from engine.test_hybrid_schedules import MODELS, play


def one(a):
    try:
        d = play(*a)
    except BaseException as e:
        return a[0], a[1], type(e).__name__ + ": " + str(e)[:150]
    us = [t.usage for t in d.finished]
    return (
        a[0],
        a[1],
        [len(us)]
        + [
            sum(getattr(u, k + "_tokens") for u in us)
            for k in ("gpu_cached", "swapped_in", "recomputed", "new")
        ],
    )


if __name__ == "__main__":
    lo, hi, w = map(int, sys.argv[1:4])
    bad = 0
    tot = {}
    jobs = [(n, s) for s in range(lo, hi) for n in MODELS]
    with ProcessPoolExecutor(w) as ex:
        for r in ex.map(one, jobs, chunksize=4):
            if isinstance(r[2], str):
                bad += 1
                print(r, flush=True)
            else:
                tot[r[0]] = [a + b for a, b in zip(tot.get(r[0], [0] * 5), r[2])]
    print("bad", bad, "of", len(jobs))
    for k, v in tot.items():
        print(k, v)
