// What a face knows of the cluster: docs/protocol.md, spoken over an anywidget model or anything that looks like one.

/** Applies a JSON merge patch (RFC 7396) in place. */
export function applyPatch(state, patch) {
  for (const key of Object.keys(patch)) {
    const value = patch[key];
    if (value === null) delete state[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const inner = state[key];
      const into = inner !== null && typeof inner === "object" && !Array.isArray(inner) ? inner : {};
      state[key] = applyPatch(into, value);
    } else state[key] = value;
  }
  return state;
}

export const EMPTY = { hosts: {}, meshes: {}, ranks: {}, failures: {}, sessions: {}, detached: {} };

const ALIVE_MS = 30000;
const GREETING_MS = 4000;
const FIRST_MS = 150;
const REQUEST_MS = 120000;

/** One connection to the kernel, shared by all views of a model. `channel` has send(message) and onMessage(callback). */
export class Cluster {
  constructor(channel, saved) {
    this.state = { ...structuredClone(EMPTY), ...saved?.state }; // of which sections may be left out
    this.savedAt = saved?.now ?? 0;
    this.live = false;
    this.skew = 0; // what the kernel's clock is ahead of ours, in seconds
    this._channel = channel;
    this._seq = -1;
    this._views = new Set();
    this._topics = new Map();
    this._replies = new Map();
    this._counter = 0;
    this._prefix = Math.random().toString(36).slice(2, 8);
    this._off = channel.onMessage((message) => this._take(message));
  }

  /** Calls `listener(patch)` with each change, with null after a snapshot. The result ends it. */
  watch(listener) {
    this._views.add(listener);
    if (this._views.size === 1) this._open();
    else if (this._seq >= 0) listener(null);
    return () => {
      this._views.delete(listener);
      if (!this._views.size) this._close();
    };
  }

  _open() {
    this._insist({ type: "watch", topic: "cluster" }, () => this._seq >= 0 || !this._views.size);
    this._beat = setInterval(() => this._send({ type: "alive" }), ALIVE_MS);
    this._greeting = setTimeout(() => this._turn(), GREETING_MS);
  }

  _close() {
    clearInterval(this._beat);
    clearTimeout(this._greeting);
    this._send({ type: "unwatch", topic: "cluster" });
    this.live = false;
    this._seq = -1;
  }

  _send(message) {
    try {
      this._channel.send(message);
    } catch {
      this.live = false; // no kernel: what is there is shown as it was
    }
  }

  /** Sends again until it is answered: what is sent before the comm has its subshell waits for the cell that runs. */
  _insist(message, done, wait = FIRST_MS) {
    this._send(message);
    if (wait < GREETING_MS) setTimeout(() => done() || this._insist(message, done, 3 * wait), wait);
  }

  _turn() {
    for (const view of this._views) view(null);
  }

  /** The way to the kernel is gone; `forget` where the kernel is, too, and what is known with it. */
  lost(why, forget) {
    this.savedAt = this.now();
    this.live = false;
    this._seq = -1;
    if (forget) this.state = structuredClone(EMPTY);
    const waiting = [...this._replies.values()];
    this._replies.clear();
    for (const { reject, late } of waiting) {
      clearTimeout(late);
      reject(new Error(why));
    }
    this._turn();
  }

  /** There is a way again, perhaps to another kernel: what is watched is watched there. */
  found() {
    if (this._views.size) this._send({ type: "watch", topic: "cluster" });
    for (const { message } of this._topics.values()) this._send(message);
  }

  now() {
    return this.live ? Date.now() / 1000 + this.skew : this.savedAt || Date.now() / 1000;
  }

  /** Logs, metrics, or what the debugger holds: `listener(message)` with what comes. The result ends it. */
  subscribe(wish, listener) {
    const id = `${wish.topic}-${this._prefix}-${++this._counter}`;
    const message = { type: "watch", ...wish, id };
    this._topics.set(id, { message, listener, heard: false });
    this._insist(message, () => !this._topics.has(id) || this._topics.get(id).heard);
    return () => {
      if (this._topics.delete(id)) this._send({ type: "unwatch", id });
    };
  }

  /** Asks the kernel for something; resolves with the result, rejects with an Error that people can read. */
  request(verb, more = {}) {
    const id = `${this._prefix}-${++this._counter}`;
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        this._replies.delete(id);
        reject(new Error("the kernel has not answered; a cell may be running"));
      }, REQUEST_MS);
      this._replies.set(id, { resolve, reject, late });
      this._send({ type: "request", id, verb, ...more });
    });
  }

  _hear(topic, message) {
    if (!topic) return;
    topic.heard = true;
    topic.listener(message);
  }

  _take(message) {
    if (typeof message.now === "number") this.skew = message.now - Date.now() / 1000;
    switch (message.type) {
      case "hello":
        if (this._engine !== undefined && this._engine !== message.engine) this._seq = -1;
        if (this._engine === message.engine && this._views.size && this._seq >= 0)
          this._send({ type: "watch", topic: "cluster" }); // it had given us up
        this._engine = message.engine;
        break;
      case "snapshot":
        clearTimeout(this._greeting);
        this.state = { ...structuredClone(EMPTY), ...message.state };
        this._seq = message.seq;
        this.live = true;
        this._turn();
        break;
      case "delta":
        if (this._seq < 0) return;
        if (message.prev !== this._seq) {
          this._seq = -1;
          this._send({ type: "watch", topic: "cluster" });
          return;
        }
        this._seq = message.seq;
        applyPatch(this.state, message.patch);
        for (const view of this._views) view(message.patch);
        break;
      case "logs":
      case "metrics":
      case "debug":
        this._hear(this._topics.get(message.id), message);
        break;
      case "reply": {
        const waiting = this._replies.get(message.id);
        if (!waiting) return;
        this._replies.delete(message.id);
        clearTimeout(waiting.late);
        if (message.ok) waiting.resolve(message.result ?? {});
        else waiting.reject(new Error(message.error));
      }
    }
  }
}

const clusters = new WeakMap();

/** The connection of an anywidget model. */
export function clusterOf(model) {
  let cluster = clusters.get(model);
  if (!cluster) {
    cluster = new Cluster(
      {
        send: (message) => model.send(message),
        onMessage: (callback) => {
          model.on("msg:custom", callback);
          return () => model.off("msg:custom", callback);
        },
      },
      model.get("saved"),
    );
    clusters.set(model, cluster);
  }
  return cluster;
}

// -- reading the state -------------------------------------------------------------------------------------------------

/** How a rank is, always with a state. */
export function rankOf(state, uid, index) {
  const known = state.ranks[uid]?.[index];
  const usual = state.meshes[uid]?.state ?? "stopped";
  return known ? (known.state ? known : { ...known, state: usual }) : { state: usual };
}

/** The coordinates of a row-major index. */
export function pointOf(sizes, index) {
  const point = new Array(sizes.length);
  for (let d = sizes.length - 1; d >= 0; d--) {
    point[d] = index % sizes[d];
    index = Math.floor(index / sizes[d]);
  }
  return point;
}

/** The base rank (that of the procs) of a rank of a mesh. */
export function baseOf(mesh, index) {
  const point = pointOf(mesh.sizes, index);
  return point.reduce((sum, at, d) => sum + at * mesh.strides[d], mesh.offset ?? 0);
}

/** The actors that live on a proc: [uid, mesh, index] each. */
export function actorsOn(state, uid, base) {
  const found = [];
  for (const [other, mesh] of Object.entries(state.meshes)) {
    if (mesh.on !== uid || mesh.stopped) continue;
    const index = indexOfBase(mesh, base);
    if (index >= 0) found.push([other, mesh, index]);
  }
  return found;
}

export function indexOfBase(mesh, base) {
  let left = base - (mesh.offset ?? 0);
  let index = 0;
  const order = mesh.strides.map((stride, d) => [stride, d]).sort((a, b) => b[0] - a[0]);
  const point = new Array(mesh.sizes.length).fill(0);
  for (const [stride, d] of order) {
    if (!stride) continue;
    point[d] = Math.floor(left / stride);
    if (point[d] < 0 || point[d] >= mesh.sizes[d]) return -1;
    left -= point[d] * stride;
  }
  if (left !== 0) return -1;
  for (let d = 0; d < point.length; d++) index = index * mesh.sizes[d] + point[d];
  return index;
}

/** A slice expression for the ranks that are selected, or "" where they are no box with equal steps. */
export function sliceExpression(name, labels, sizes, indices) {
  if (!indices.length) return "";
  const points = indices.map((index) => pointOf(sizes, index));
  const picks = [];
  let expected = 1;
  for (let d = 0; d < labels.length; d++) {
    const values = [...new Set(points.map((point) => point[d]))].sort((a, b) => a - b);
    expected *= values.length;
    if (values.length === sizes[d] && sizes[d] > 1) continue;
    if (values.length === 1) {
      picks.push(`${labels[d]}=${values[0]}`);
      continue;
    }
    const step = values[1] - values[0];
    if (values.some((value, at) => value !== values[0] + at * step)) return "";
    const end = values[values.length - 1] + 1;
    picks.push(`${labels[d]}=slice(${values[0]}, ${end}${step > 1 ? `, ${step}` : ""})`);
  }
  if (expected !== indices.length) return "";
  return picks.length ? `${name}.slice(${picks.join(", ")})` : name;
}
