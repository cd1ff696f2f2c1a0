"""The notebook of marimo that docs/guides/marimo.md shows a picture of; scripts/screenshots.py opens it."""
# ruff: noqa: N803

import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import monarch
    from monarch.actor import Actor, current_rank, endpoint, this_host
    from monarch_kernel import show

    class Trainer(Actor):
        @endpoint
        def step(self):
            return current_rank().rank ** 2

    return Trainer, monarch, show, this_host


@app.cell
def _(Trainer, this_host):
    workers = this_host().spawn_procs(per_host={"gpus": 4}, name="workers")
    trainers = workers.spawn("trainers", Trainer)
    trainers.initialized.get()
    return trainers, workers


@app.cell
def _(show, trainers):
    show(trainers.step.call().get())
    return


@app.cell
def _(monarch, show, trainers):
    with monarch.profile(trainers, hz=500) as profile:
        for _ in range(50):
            trainers.step.call().get()
    show(profile)
    return


@app.cell
def _(show, trainers, workers):
    workers.slice(gpus=2).run(exit).exception()
    show(trainers)
    return


if __name__ == "__main__":
    app.run()
