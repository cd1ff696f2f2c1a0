// A front end's copy of the state of the cluster: docs/protocol.md, over an anywidget model or an object like one.

import { say } from "../page/language";
import type { FromKernel, Requests, RequestVerb, TitledView, Topic, Topics, Watch } from "./messages";
import { type ClusterState, EMPTY, type Patch } from "./state";

const ALIVE_MS = 30_000;
const GREETING_MS = 4000;
const FIRST_MS = 150;
const REQUEST_MS = 120_000;

/** The connection to the kernel. `send` throws without one. */
export interface Channel {
  send(message: object): void;
  onMessage(callback: (message: FromKernel) => void): () => void;
}

/** The state as it was when a notebook was saved; sections may be missing. */
export interface Saved {
  state?: Partial<ClusterState>;
  now?: number;
  engine?: string;
}

type Section = keyof ClusterState;
const SECTIONS = Object.keys(EMPTY) as readonly Section[];

/** Called with each change, with null after a snapshot. */
export type Listener = (patch: Patch | null) => void;

interface Subscription {
  message: object;
  listener: (message: never) => void;
  answered: boolean;
}

interface Waiting {
  message: object;
  resolve: (result: never) => void;
  reject: (error: Error) => void;
  timeout: ReturnType<typeof setTimeout>;
}

type Json = Record<string, unknown>;

const isObject = (value: unknown): value is Json => value !== null && typeof value === "object" && !Array.isArray(value);

/** Applies a JSON merge patch (RFC 7396) in place. */
export function applyPatch<T extends object>(state: T, patch: object): T {
  const into = state as Json;
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete into[key];
    else if (isObject(value)) {
      const inner = into[key];
      into[key] = applyPatch(isObject(inner) ? inner : {}, value);
    } else into[key] = value;
  }
  return state;
}

/** One connection to the kernel, shared by all views of a model. */
export class Cluster {
  state: ClusterState;
  live = false;
  /** Views that the kernel has brought, beside those of the page. */
  views: TitledView[] = [];

  constructor(
    private _channel: Channel,
    saved?: Saved,
  ) {
    this.state = { ...structuredClone(EMPTY), ...saved?.state };
    this._savedAt = saved?.now ?? 0;
    this._engine = saved?.engine;
    _channel.onMessage((message) => this._receive(message));
  }

  /** The engine of the kernel that it is connected to, or was; undefined before. */
  get engine(): string | undefined {
    return this._engine;
  }

  /**
   * Calls `listener` with each change until the result is called. The kernel sends the `sections` that listeners request:
   * none if they only need to know whether there is a kernel.
   */
  watch(listener: Listener, sections: readonly Section[] = SECTIONS): () => void {
    const before = this._wanted;
    this._listeners.set(listener, sections);
    if (this._listeners.size === 1) this._open();
    else if (sections.some((section) => !before.includes(section))) this._send(this._watching);
    else if (this._seq >= 0) listener(null);
    return () => {
      this._listeners.delete(listener);
      if (!this._listeners.size) this._close();
    };
  }

  /** Calls `listener` with the messages of a topic until the result is called. */
  subscribe<T extends Topic>(watch: Watch<T>, listener: (message: Topics[T]) => void): () => void {
    const id = `${watch.topic}-${this._prefix}-${++this._counter}`;
    const message = { type: "watch", ...watch, id };
    this._subscriptions.set(id, { message, listener, answered: false });
    this._insist(message, () => this._subscriptions.get(id)?.answered ?? true);
    return () => {
      if (this._subscriptions.delete(id)) this._send({ type: "unwatch", id });
    };
  }

  /** Sends a message of a view of the kernel; its subscriptions are sent again after a reconnect. */
  send(message: { type?: string; id?: string }): void {
    if (message.type === "watch" && message.id) this._watched.set(message.id, message);
    if (message.type === "unwatch" && message.id) this._watched.delete(message.id);
    this._send(message);
  }

  /** Calls `listener` with every message of the kernel until the result is called. */
  onMessage(listener: (message: FromKernel) => void): () => void {
    this._messageListeners.add(listener);
    return () => void this._messageListeners.delete(listener);
  }

  /** Sends a request to the kernel; resolves with the result, rejects with an Error whose text is for users. */
  request<V extends RequestVerb>(verb: V, content: Requests[V]["takes"]): Promise<Requests[V]["gives"]> {
    const id = `${this._prefix}-${++this._counter}`;
    return new Promise((resolve, reject) => {
      const timeout = setTimeout(() => {
        this._waiting.delete(id);
        reject(new Error(say`the kernel has not answered; a cell may be running`));
      }, REQUEST_MS);
      const message = { type: "request", id, verb, ...content };
      this._waiting.set(id, { message, resolve, reject, timeout });
      this._send(message);
    });
  }

  /** The kernel's clock, in seconds; saved state keeps the time of saving. */
  now(): number {
    return this.live ? Date.now() / 1000 + this._skew : this._savedAt || Date.now() / 1000;
  }

  /** The connection to the kernel is lost; `forget` clears the state where the kernel has ended. */
  lost(why: string, forget = false): void {
    this._savedAt = this.now();
    this.live = false;
    this._seq = -1;
    if (forget) {
      this.state = structuredClone(EMPTY);
      this.views = [];
      this._watched.clear();
    }
    const waiting = [...this._waiting.values()];
    this._waiting.clear();
    for (const { reject, timeout } of waiting) {
      clearTimeout(timeout);
      reject(new Error(why));
    }
    this._notify(null);
  }

  /** Asks the kernel for its count of sent messages; lost ones lead to a new snapshot. */
  check(): void {
    if (this._listeners.size) this._send({ type: "alive" });
  }

  /** After an interruption of the connection to this kernel: subscribes and sends pending requests again. */
  recovered(): void {
    this.reconnected();
    for (const { message } of this._waiting.values()) this._send(message); // the kernel executes each once
  }

  /** After a connect, perhaps to another kernel: subscribes there. */
  reconnected(): void {
    this._sent = -1;
    if (this._listeners.size) this._send(this._watching);
    for (const { message } of this._subscriptions.values()) this._send(message);
    for (const message of this._watched.values()) this._send(message);
    this.check(); // counts from here on
  }

  private _open(): void {
    this._insist(this._watching, () => this._seq >= 0 || !this._listeners.size);
    this.check();
    this._beat = setInterval(() => this.check(), ALIVE_MS);
    this._greeting = setTimeout(() => this._notify(null), GREETING_MS);
  }

  private _close(): void {
    clearInterval(this._beat);
    clearTimeout(this._greeting);
    this._send({ type: "unwatch", topic: "cluster" });
    this.live = false;
    this._seq = -1;
  }

  private _send(message: object): void {
    try {
      this._channel.send(message);
    } catch {
      this.live = false; // no kernel: the last state stays in view
    }
  }

  /** Resends until answered: messages sent before the comm has its subshell wait for the running cell. */
  private _insist(message: object, answered: () => boolean, wait = FIRST_MS): void {
    this._send(message);
    if (wait < GREETING_MS) setTimeout(() => answered() || this._insist(message, answered, 3 * wait), wait);
  }

  private _notify(patch: Patch | null): void {
    for (const listener of this._listeners.keys()) listener(patch);
  }

  private get _wanted(): Section[] {
    return SECTIONS.filter((section) => [...this._listeners.values()].some((sections) => sections.includes(section)));
  }

  private get _watching(): object {
    const sections = this._wanted;
    return { type: "watch", topic: "cluster", ...(sections.length < SECTIONS.length ? { sections } : {}) };
  }

  /** Whether a message was lost since the last count. */
  private _missing(count: number): boolean {
    const missing = this._sent >= 0 && count - this._sent !== this._received;
    this._sent = count;
    this._received = 0;
    return missing;
  }

  private _receive(message: FromKernel): void {
    if (message.type === "alive") {
      if (this._missing(message.sent)) this.recovered();
      return;
    }
    this._received++;
    if (typeof message.now === "number") this._skew = message.now - Date.now() / 1000;
    for (const listener of this._messageListeners) listener(message);
    switch (message.type) {
      case "hello":
        if (this._engine !== undefined && this._engine !== message.engine) this._seq = -1;
        if (this._engine === message.engine && this._listeners.size && this._seq >= 0)
          this._send(this._watching); // the kernel had dropped this page
        this._engine = message.engine;
        break;
      case "views":
        this.views = message.views;
        this._notify(null);
        break;
      case "snapshot":
        clearTimeout(this._greeting);
        this.state = { ...structuredClone(EMPTY), ...message.state };
        this._seq = message.seq;
        this.live = true;
        this._notify(null);
        break;
      case "delta":
        if (this._seq < 0) return;
        if (message.prev !== this._seq) {
          this._seq = -1;
          this._send(this._watching);
          return;
        }
        this._seq = message.seq;
        applyPatch(this.state, message.patch);
        this._notify(message.patch);
        break;
      case "logs":
      case "metrics":
      case "tensors":
      case "transfers":
      case "profiles":
      case "timeline":
      case "history":
      case "debug": {
        const subscription = this._subscriptions.get(message.id);
        if (!subscription) return;
        subscription.answered = true;
        subscription.listener(message as never);
        break;
      }
      case "reply": {
        const waiting = this._waiting.get(message.id);
        if (!waiting) return;
        this._waiting.delete(message.id);
        clearTimeout(waiting.timeout);
        if (message.ok) waiting.resolve((message.result ?? {}) as never);
        else waiting.reject(new Error(message.error));
      }
    }
  }

  private _beat: ReturnType<typeof setInterval> | undefined;
  private _counter = 0;
  private _engine: string | undefined;
  private _greeting: ReturnType<typeof setTimeout> | undefined;
  private _received = 0; // messages since the last count of the kernel
  private _messageListeners = new Set<(message: FromKernel) => void>();
  private _listeners = new Map<Listener, readonly Section[]>();
  private _prefix = Math.random().toString(36).slice(2, 8);
  private _sent = -1; // the last count of the kernel
  private _savedAt = 0;
  private _seq = -1;
  private _skew = 0; // seconds by which the kernel's clock is ahead of the page's
  private _subscriptions = new Map<string, Subscription>();
  private _waiting = new Map<string, Waiting>();
  private _watched = new Map<string, object>(); // by views of the kernel
}
