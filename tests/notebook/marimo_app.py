"""A program of marimo, as docs/guides/marimo.md has it; a test runs it where marimo is installed."""
# ruff: noqa: N803

import marimo

app = marimo.App()


@app.cell
def _():
    import monarch
    from monarch.actor import Actor, current_rank, endpoint, run_on, this_host
    from monarch_kernel import show

    return Actor, current_rank, endpoint, monarch, run_on, show, this_host


@app.cell
def _(Actor, current_rank, endpoint, this_host):
    class Worker(Actor):
        @endpoint
        def work(self):
            return current_rank().rank

    workers = this_host().spawn_procs(per_host={"gpus": 2}, name="workers")
    trainers = workers.spawn("trainers", Worker)
    return trainers, workers


@app.cell
def _(monarch, run_on, show, trainers, workers):
    print(trainers.work.call().get().values())
    print(list(run_on(workers, "rank * 10").get().values()))
    kind, html = show(trainers)._mime_()
    print(kind, "trainers" if "trainers" in html else html)
    with monarch.profile(trainers) as found:
        trainers.work.call().get()
    kind, html = show(found)._mime_()
    print(kind, "Profile of trainers" if "Profile of trainers" in html else html)
    workers.stop().get()


if __name__ == "__main__":
    app.run()
