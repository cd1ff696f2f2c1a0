"""Workers that take the parameters of a learner again and again, on Ray."""

import ray
from facts import fact, now
from task import RANKS, VERSIONS, check, parameters


@ray.remote
class Learner:
    def learn(self, version: int) -> list:
        return [ray.put(parameters(version))]


@ray.remote
class Generator:
    def take(self, weights: object, version: int) -> int:
        return check(weights, version)


ray.init(num_cpus=RANKS + 1, include_dashboard=False)
learner = Learner.remote()
generators = [Generator.remote() for _ in range(RANKS)]
seconds = []
for version in range(VERSIONS + 1):
    [weights] = ray.get(learner.learn.remote(version))
    began = now()
    ray.get([generator.take.remote(weights, version) for generator in generators])
    seconds.append(now() - began)
fact("ms a version", 1e3 * min(seconds[1:]))
