// What a face knows of the cluster: patches, snapshots and deltas, in whatever order and with whatever losses.

import assert from "node:assert/strict";
import { test } from "node:test";

import { applyPatch, baseOf, Cluster, indexOfBase, pointOf, rankOf, sliceExpression } from "./static/cluster.js";

/** Numbers that are the same each time. */
function random(seed) {
  let state = seed;
  return () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state / 2147483648;
  };
}

/** A kernel that changes its state at random, and tells it as docs/protocol.md has it. */
class Kernel {
  constructor(seed) {
    this.next = random(seed);
    this.state = { hosts: {}, meshes: { m: { name: "w", state: "idle" } }, ranks: { m: {} }, failures: {}, sessions: {}, detached: {} };
    this.seq = 0;
  }

  delta() {
    const index = String(Math.floor(this.next() * 6));
    const what = this.next();
    const patch =
      what < 0.3
        ? { ranks: { m: { [index]: { state: "busy", endpoint: "step", queue: Math.floor(this.next() * 4) } } } }
        : what < 0.6
          ? { ranks: { m: { [index]: { state: null, endpoint: null } } } }
          : what < 0.8
            ? { failures: { [index]: { title: `failure ${index}`, told: [["a call", "asked"]] } } }
            : { failures: { [index]: null } };
    applyPatch(this.state, structuredClone(patch));
    return { type: "delta", prev: this.seq, seq: ++this.seq, now: 1, patch };
  }

  snapshot() {
    return { type: "snapshot", seq: this.seq, now: 1, state: structuredClone(this.state) };
  }
}

function connected() {
  const sent = [];
  let take;
  const cluster = new Cluster({ send: (message) => sent.push(message), onMessage: (callback) => ((take = callback), () => {}) });
  const end = cluster.watch(() => {});
  return { cluster, sent, end, take: (message) => take(structuredClone(message)) };
}

for (let seed = 1; seed <= 60; seed++)
  test(`deltas in any order, lost or told twice, end in the kernel's state (${seed})`, () => {
    const kernel = new Kernel(seed);
    const { cluster, sent, end, take } = connected();
    for (let i = 0; i < 5; i++) kernel.delta();
    take(kernel.snapshot());
    const told = [];
    for (let i = 0; i < 30; i++) {
      const delta = kernel.delta();
      if (kernel.next() < 0.9) told.push(delta);
      if (kernel.next() < 0.1) told.push(delta);
    }
    for (let i = told.length - 1; i > 0; i--)
      if (kernel.next() < 0.3) {
        const j = Math.max(0, i - Math.floor(kernel.next() * 4));
        [told[i], told[j]] = [told[j], told[i]];
      }
    for (const delta of told) {
      const asked = sent.length;
      take(delta);
      if (sent.length > asked) {
        assert.deepEqual(sent.at(-1), { type: "watch", topic: "cluster" });
        take(kernel.snapshot());
      }
    }
    take(kernel.delta()); // the next one shows whether anything is missing
    if (sent.at(-1)?.topic === "cluster") take(kernel.snapshot());
    assert.deepEqual(cluster.state, kernel.state);
    end();
  });

test("a new engine makes what was known void", () => {
  const kernel = new Kernel(7);
  const { cluster, end, take } = connected();
  take({ type: "hello", engine: "one", now: 1 });
  take(kernel.snapshot());
  take({ type: "hello", engine: "two", now: 1 });
  take(kernel.delta());
  assert.deepEqual(cluster.state.ranks, { m: {} }); // that delta was none of this state's
  end();
});

test("requests are answered by their number, also late and out of order, and say what went wrong", async () => {
  const { cluster, sent, end, take } = connected();
  const [heal, stop] = [cluster.request("heal", { mesh: "m" }), cluster.request("stop", { mesh: "m" })];
  const [first, second] = sent.filter((message) => message.type === "request").map(({ id }) => id);
  take({ type: "reply", id: second, ok: false, error: "there is no mesh 'm' any more" });
  take({ type: "reply", id: first, ok: true, result: { text: "healed" } });
  assert.deepEqual(await heal, { text: "healed" });
  await assert.rejects(stop, /there is no mesh/);
  end();
});

test("a rank without a record is as its mesh is, and one of a mesh that is gone is stopped", () => {
  const state = { meshes: { m: { state: "idle" } }, ranks: { m: { 1: { state: "busy" }, 2: { pid: 7 } } } };
  assert.deepEqual([0, 1, 2].map((index) => rankOf(state, "m", index).state), ["idle", "busy", "idle"]);
  assert.equal(rankOf(state, "gone", 0).state, "stopped");
});

test("ranks and base ranks are each other's inverse, for slices with offset and steps too", () => {
  for (const mesh of [{ sizes: [4], strides: [1] }, { sizes: [2, 3], strides: [8, 2], offset: 1 }, { sizes: [], strides: [], offset: 5 }, { sizes: [3, 2], strides: [1, 4] }]) {
    const count = mesh.sizes.reduce((product, size) => product * size, 1);
    for (let index = 0; index < count; index++) assert.equal(indexOfBase(mesh, baseOf(mesh, index)), index);
  }
  assert.equal(indexOfBase({ sizes: [2], strides: [2], offset: 1 }, 2), -1);
});

test("what is selected is written as the slice that gives it", () => {
  const of = (...indices) => sliceExpression("trainers", ["hosts", "gpus"], [2, 4], indices);
  assert.equal(of(0, 1), "trainers.slice(hosts=0, gpus=slice(0, 2))");
  assert.equal(of(0, 1, 2, 3), "trainers.slice(hosts=0)");
  assert.equal(of(1, 5), "trainers.slice(gpus=1)");
  assert.equal(of(0, 2), "trainers.slice(hosts=0, gpus=slice(0, 3, 2))");
  assert.equal(of(0, 1, 2, 3, 4, 5, 6, 7), "trainers");
  assert.equal(of(0, 5), ""); // no box
  assert.equal(of(), "");
});

test("every slice expression selects exactly the ranks it was made of", () => {
  const next = random(3);
  const sizes = [3, 2, 4];
  for (let round = 0; round < 300; round++) {
    const indices = [...new Set(Array.from({ length: 1 + Math.floor(next() * 6) }, () => Math.floor(next() * 24)))].sort((a, b) => a - b);
    const expression = sliceExpression("m", ["a", "b", "c"], sizes, indices);
    if (!expression) continue;
    const picks = Object.fromEntries([...expression.matchAll(/(\w)=(?:slice\((\d+), (\d+)(?:, (\d+))?\)|(\d+))/g)].map(([, label, from, to, step, one]) => [label, one === undefined ? [Number(from), Number(to), Number(step ?? 1)] : [Number(one), Number(one) + 1, 1]]));
    const chosen = Array.from({ length: 24 }, (_, index) => index).filter((index) =>
      pointOf(sizes, index).every((at, d) => {
        const pick = picks["abc"[d]];
        return !pick || (at >= pick[0] && at < pick[1] && (at - pick[0]) % pick[2] === 0);
      }),
    );
    assert.deepEqual(chosen, indices, expression);
  }
});
