import fc from "fast-check";
import { describe, expect, it, vi } from "vitest";

import { Cluster, applyPatch } from "../src/cluster/client";
import type { FromKernel } from "../src/cluster/messages";
import { empty, four } from "./made";

interface Sent {
  type: string;
  topic?: string;
  id?: string;
  verb?: string;
}

function connected(): { cluster: Cluster; sent: Sent[]; take: (message: object) => void } {
  const sent: Sent[] = [];
  let take: (message: FromKernel) => void = () => undefined;
  const cluster = new Cluster({
    send: (message) => void sent.push(structuredClone(message) as Sent),
    onMessage: (callback) => {
      take = callback;
      return () => undefined;
    },
  });
  return { cluster, sent, take: (message) => take(message as FromKernel) };
}

const key = fc.constantFrom("a", "b", "c");
const leaf = fc.oneof(fc.integer({ min: 0, max: 9 }), fc.constantFrom("idle", "busy"), fc.array(fc.integer(), { maxLength: 2 }));
const tree = fc.dictionary(key, fc.dictionary(key, fc.oneof(leaf, fc.dictionary(key, leaf))));
const part = fc.dictionary(key, fc.oneof(fc.constant(null), fc.dictionary(key, fc.oneof(fc.constant(null), leaf, fc.dictionary(key, fc.oneof(fc.constant(null), leaf))))));

/** A merge patch applied by the letter of RFC 7396, to something new. */
function merged(target: unknown, patch: unknown): unknown {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result: Record<string, unknown> = target !== null && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = merged(result[name], value);
  }
  return result;
}

describe("what is watched", () => {
  it("is what the views of a connection want together", () => {
    const { cluster, sent, take } = connected();
    const watched = (): unknown => sent.filter((message) => message.topic === "cluster").at(-1);
    const end = cluster.watch(() => undefined, []);
    expect(watched()).toEqual({ type: "watch", topic: "cluster", sections: [] });
    take({ type: "snapshot", seq: 0, now: 1, state: {} });
    expect(cluster.live).toBe(true);
    cluster.watch(() => undefined, ["tensors"]);
    expect(watched()).toEqual({ type: "watch", topic: "cluster", sections: ["tensors"] });
    cluster.watch(() => undefined);
    expect(watched()).toEqual({ type: "watch", topic: "cluster" });
    const count = sent.length;
    end();
    cluster.watch(() => undefined, ["meshes"]);
    expect(sent.length).toBe(count);
  });
});

describe("the state of the cluster", () => {
  it("is the snapshot with all patches applied, as RFC 7396 has it", () => {
    fc.assert(
      fc.property(tree, fc.array(part, { maxLength: 6 }), (first, patches) => {
        const { cluster, take } = connected();
        cluster.watch(() => undefined);
        take({ type: "snapshot", seq: 0, now: 1, state: { meshes: structuredClone(first) } });
        patches.forEach((patch, at) => take({ type: "delta", prev: at, seq: at + 1, now: 1, patch: { meshes: structuredClone(patch) } }));
        const expected = patches.reduce<unknown>((state, patch) => merged(state, { meshes: patch }), { ...empty(), meshes: first });
        expect(cluster.state).toEqual(expected);
      }),
    );
  });

  it("is the same whichever snapshot it began from", () => {
    fc.assert(
      fc.property(tree, fc.array(part, { minLength: 1, maxLength: 6 }), fc.nat(), (first, patches, pick) => {
        const from = pick % patches.length;
        const states = [{ meshes: first } as object];
        for (const patch of patches) states.push(merged(states.at(-1), { meshes: patch }) as object);
        const [early, late] = [connected(), connected()];
        for (const [face, begin] of [[early, 0], [late, from]] as const) {
          face.cluster.watch(() => undefined);
          face.take({ type: "snapshot", seq: begin, now: 1, state: structuredClone(states[begin]) });
          for (let at = begin; at < patches.length; at++) face.take({ type: "delta", prev: at, seq: at + 1, now: 1, patch: { meshes: structuredClone(patches[at]) } });
        }
        expect(late.cluster.state).toEqual(early.cluster.state);
      }),
    );
  });

  it("is asked for anew where deltas are lost, and late ones change nothing until then", () => {
    fc.assert(
      fc.property(fc.array(part, { minLength: 2, maxLength: 6 }), fc.nat(), (patches, pick) => {
        const lost = pick % (patches.length - 1);
        const { cluster, sent, take } = connected();
        cluster.watch(() => undefined);
        take({ type: "snapshot", seq: 0, now: 1, state: four() });
        const asked = sent.length;
        let before = "";
        patches.forEach((patch, at) => {
          if (at === lost) before = JSON.stringify(cluster.state);
          else take({ type: "delta", prev: at, seq: at + 1, now: 1, patch: { meshes: structuredClone(patch) } });
        });
        expect(JSON.stringify(cluster.state)).toBe(before);
        expect(sent.slice(asked)).toEqual([{ type: "watch", topic: "cluster" }]);
        take({ type: "snapshot", seq: 99, now: 1, state: four() });
        expect(cluster.state).toEqual(four());
      }),
    );
  });

  it("is that of the kernel in the end, whichever deltas came late, twice or never", () => {
    fc.assert(
      fc.property(fc.array(fc.record({ patch: part, comes: fc.constantFrom(0, 1, 1, 1, 2), late: fc.constantFrom(0, 0, 1, 3) }), { maxLength: 20 }), (changes) => {
        const { cluster, sent, take } = connected();
        const state = { ...empty(), meshes: {} };
        let seq = 0;
        const snapshot = (): object => ({ type: "snapshot", seq, now: 1, state: structuredClone(state) });
        const change = (patch: object): object => {
          applyPatch(state, structuredClone({ meshes: patch }));
          return { type: "delta", prev: seq, seq: ++seq, now: 1, patch: structuredClone({ meshes: patch }) };
        };
        const asks = (act: () => void): boolean => {
          const before = sent.length;
          act();
          return sent.length > before;
        };
        cluster.watch(() => undefined);
        take(snapshot());
        const deltas = changes.flatMap(({ patch, comes, late }, at) => {
          const delta = change(patch);
          return Array.from({ length: comes }, () => ({ delta, place: at + late }));
        });
        for (const { delta } of deltas.sort((a, b) => a.place - b.place)) if (asks(() => take(delta))) take(snapshot());
        const last = change({ a: {} }); // shows whether anything is missing
        if (asks(() => take(last))) take(snapshot());
        expect(cluster.state).toEqual(state);
      }),
    );
  });

  it("is void where the engine is another one", () => {
    const { cluster, take } = connected();
    cluster.watch(() => undefined);
    take({ type: "hello", engine: "one", now: 1 });
    take({ type: "snapshot", seq: 5, now: 1, state: four() });
    take({ type: "hello", engine: "two", now: 1 });
    take({ type: "delta", prev: 5, seq: 6, now: 1, patch: { meshes: { w: { name: "other" } } } });
    expect(cluster.state).toEqual(four());
  });

  it("keeps what a patch does not name", () => {
    expect(applyPatch({ a: { b: 1, c: 2 } }, { a: { b: null } })).toEqual({ a: { c: 2 } });
  });
});

describe("requests", () => {
  it("are answered by their number, also late and out of order, and say what went wrong", async () => {
    const { cluster, sent, take } = connected();
    const [heal, stop] = [cluster.request("heal", { mesh: "w" }), cluster.request("stop", { mesh: "w" })];
    const [first, second] = sent.map(({ id }) => id);
    take({ type: "reply", id: second, ok: false, error: "there is no mesh w any more" });
    take({ type: "reply", id: first, ok: true, result: { text: "healed" } });
    expect(await heal).toEqual({ text: "healed" });
    await expect(stop).rejects.toThrow("there is no mesh w any more");
  });
});

describe("a connection that goes and comes", () => {
  it("rejects what waits, and keeps the state unless it is void", async () => {
    const { cluster, take } = connected();
    const seen = vi.fn();
    cluster.watch(seen);
    take({ type: "snapshot", seq: 1, now: 1, state: four() });
    const asked = cluster.request("heal", { mesh: "w" });
    cluster.lost("the kernel was restarted");
    await expect(asked).rejects.toThrow("the kernel was restarted");
    expect(cluster.live).toBe(false);
    expect(Object.keys(cluster.state.meshes)).toEqual(["w", "t"]);
    cluster.lost("again", true);
    expect(cluster.state).toEqual(empty());
    expect(seen).toHaveBeenLastCalledWith(null);
  });

  it("watches again all that is watched, once it is there again", () => {
    const { cluster, sent } = connected();
    const end = cluster.watch(() => undefined);
    cluster.subscribe({ topic: "logs", mesh: "w" }, () => undefined);
    const over = cluster.subscribe({ topic: "metrics", mesh: "w" }, () => undefined);
    over();
    sent.length = 0;
    cluster.reconnected();
    expect(sent.map(({ type, topic }) => [type, topic])).toEqual([["watch", "cluster"], ["watch", "logs"], ["alive", undefined]]);
    end();
    sent.length = 0;
    cluster.reconnected();
    expect(sent.map(({ topic }) => topic)).toEqual(["logs"]);
  });

  it("has anew what it watches, and asks again, where the kernel has said more than was heard", () => {
    const { cluster, sent, take } = connected();
    cluster.watch(() => undefined);
    expect(sent.map(({ type }) => type)).toContain("alive");
    take({ type: "snapshot", seq: 1, now: 1, state: four() });
    take({ type: "alive", sent: 8 }); // other pages have heard of this kernel before
    void cluster.request("heal", { mesh: "w" }).catch(() => undefined);
    sent.length = 0;
    take({ type: "delta", prev: 1, seq: 2, now: 1, patch: {} });
    take({ type: "alive", sent: 9 });
    expect(sent).toEqual([]);
    take({ type: "delta", prev: 2, seq: 3, now: 1, patch: {} });
    take({ type: "alive", sent: 12 });
    expect(sent.map(({ type, verb }) => verb ?? type)).toEqual(["watch", "alive", "heal"]);
    sent.length = 0;
    take({ type: "alive", sent: 14 }); // which begins to count anew
    expect(sent).toEqual([]);
  });
});
