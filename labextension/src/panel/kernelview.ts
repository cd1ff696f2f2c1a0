// A section for a view that the kernel has brought. Its module is drawn as anywidget draws it.

import type { Cluster } from "../cluster/client";
import type { FromKernel } from "../cluster/messages";
import { h, setText } from "../page/dom";
import { say } from "../page/language";
import { Section } from "./sections";

type Callback = (message: FromKernel) => void;
type End = () => void;

interface Module {
  default?: { render?(context: { model: object; el: HTMLElement }): End | void | Promise<End | void> };
}

/** Draws the view of that name into `root`; the result ends it. Errors are shown there. */
export function drawKernelView(cluster: Cluster, name: string, root: HTMLElement): End {
  const ends: End[] = [];
  let ended = false;
  const later = (end: End): void => void (ended ? end() : ends.push(end));
  draw(cluster, name, root, later).catch((error: unknown) => {
    if (!ended) setText(root, say`${name} cannot be shown: ${error instanceof Error ? error.message : String(error)}`);
  });
  return () => {
    ended = true;
    for (const end of ends.splice(0).reverse()) end();
  };
}

async function draw(cluster: Cluster, name: string, root: HTMLElement, later: (end: End) => void): Promise<void> {
  const { script, style } = await cluster.request("view", { name });
  const module = (await import(/* webpackIgnore: true */ /* @vite-ignore */ `data:text/javascript;charset=utf-8,${encodeURIComponent(script)}`)) as Module;
  if (!module.default?.render) throw new Error(say`its module has no default export with a function render`);
  const el = h("div");
  root.append(h("style", { text: style }), el);
  const end = await module.default.render({ model: modelOf(cluster, later), el });
  if (end) later(end);
}

/** The part of anywidget's model that a view uses, on the panel's own connection. */
function modelOf(cluster: Cluster, later: (end: End) => void): object {
  const listeners = new Map<Callback, End>();
  const watched = new Set<string>();
  later(() => {
    for (const end of listeners.values()) end();
    for (const id of watched) cluster.send({ type: "unwatch", id });
  });
  return {
    get: () => ({}),
    send: (message: { type?: string; id?: string }) => {
      if (message.id && message.type === "watch") watched.add(message.id);
      if (message.id && message.type === "unwatch") watched.delete(message.id);
      cluster.send(message);
    },
    on: (_: "msg:custom", callback: Callback) => void listeners.set(callback, cluster.onMessage(callback)),
    off: (_: "msg:custom", callback: Callback) => {
      listeners.get(callback)?.();
      listeners.delete(callback);
    },
  };
}

/** A view that the kernel has brought. */
export class KernelSection extends Section {
  constructor(
    readonly name: string,
    label: string,
  ) {
    super(`view-${name}`, label);
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = drawKernelView(cluster, this.name, root);
    return () => {
      end();
      root.remove();
    };
  }
}
