import sys, random, time

sys.path.insert(0, "tests")
from pensieve.engine.cache import tails

tails.LEAST_SPAN = 8
from engine.test_hybrid_schedules import *
from concurrent.futures import ProcessPoolExecutor


def one(a):
    name, seed = a
    rng = random.Random(seed)
    device, host = rng.choice(((26, 20), (26, 0), (40, 60), (20, 8)))
    cache = config(name, device, host)
    scheduler = SchedulerConfig(
        context_limit=48, max_batch_tokens=rng.choice((8, 24, 100)), max_running=rng.choice((2, 4, 8))
    )
    clock = Clock()
    engine = make_engine(cache, scheduler, HybridWorker(cache), clock, overlapped=seed % 2 == 1)
    O = HybridOracle(MODELS[name])
    driver = Driver(engine, clock, rng, O.verify, VOCABULARY, engine._scheduler.context_limit)
    driver.tenants = seed % 3 == 0
    driver.groups = G if "G" in globals() else 0.15
    try:
        for _ in range(120):
            driver.act()
            driver.step()
        driver.run_until_idle()
    except BaseException as e:
        return name, seed, type(e).__name__ + ": " + str(e)[:150]
    us = [t.usage for t in driver.finished]
    return (
        name,
        seed,
        [len(us), len([t for t in driver.finished if t.failed])]
        + [
            sum(getattr(u, k + "_tokens") for u in us)
            for k in ("gpu_cached", "swapped_in", "recomputed", "new")
        ]
        + [sum(len(p.copies) for p in engine._worker.plans)],
    )


if __name__ == "__main__":
    lo, hi, w = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    jobs = [(n, s) for s in range(lo, hi) for n in MODELS]
    bad = 0
    tot = {}
    with ProcessPoolExecutor(w) as ex:
        for r in ex.map(one, jobs, chunksize=4):
            if isinstance(r[2], str):
                bad += 1
                print(r, flush=True)
            else:
                t = tot.setdefault(r[0], [0] * 7)
                tot[r[0]] = [a + b for a, b in zip(t, r[2])]
    print("bad", bad, "of", len(jobs))
    for k, v in tot.items():
        print(k, v)
