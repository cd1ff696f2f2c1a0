"""A notebook of marimo, as docs/guides/marimo.md has it; a test opens it in marimo's editor."""
# ruff: noqa: B018, N803 - what a cell names it runs after

import marimo

app = marimo.App()


@app.cell
def _():
    import monarch
    from monarch.actor import Actor, current_rank, endpoint, this_host
    from monarch_kernel import show

    return Actor, current_rank, endpoint, monarch, show, this_host


@app.cell
def _(Actor, current_rank, endpoint, this_host):
    class Trainer(Actor):
        def __init__(self):
            self.loss = 1.0

        @endpoint
        def step(self, batch):
            import time

            time.sleep(0.5 if current_rank().rank == 3 else 0.1)
            self.loss *= 0.9
            print(f"loss {self.loss:.3f}")
            return self.loss

        @endpoint
        def lose(self):
            import os

            os.kill(os.getpid(), 9)

    workers = this_host().spawn_procs(per_host={"gpus": 4}, name="workers")
    trainers = workers.spawn("trainers", Trainer)
    return trainers, workers


@app.cell
def _(show, trainers):
    show(trainers)
    return


@app.cell
def _(monarch, show, trainers):
    with monarch.profile(trainers) as found:
        for batch in range(2):
            trainers.step.call(batch).get()
    show(found)
    return (found,)


@app.cell
def _(found, monarch, trainers):
    found
    monarch.debug.set_breakpoint("Trainer.step", trainers.slice(gpus=2), temporary=True)
    stopped = trainers.step.call(3)
    print(monarch.debug.wait(1) and monarch.debug.table())
    print("loss on the stopped rank:", monarch.debug.eval("self.loss").values)
    monarch.debug.resume()
    stopped.get()
    return (stopped,)


@app.cell
def _(stopped, trainers):
    stopped
    trainers.slice(gpus=1).lose.broadcast()
    return


if __name__ == "__main__":
    app.run()
