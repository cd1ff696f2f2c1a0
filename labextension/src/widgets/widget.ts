// One view in the form that anywidget loads.

import { Cluster, type Saved } from "../cluster/client";
import type { FromKernel } from "../cluster/messages";
import { h } from "../page/dom";
import { BACK, GONE } from "../page/back";
import { say } from "../page/language";
import type { View } from "../views/view";

import "../views/base.css";

/** The part of anywidget's model that a view uses. */
interface Model {
  get(name: "options"): object | null;
  get(name: "saved"): Saved | null;
  send(message: object): void;
  on(event: "msg:custom", callback: (message: FromKernel) => void): void;
  off(event: "msg:custom", callback: (message: FromKernel) => void): void;
}

interface Widget {
  render(context: { model: Model; el: HTMLElement }): () => void;
}

/** The widget of a view. Its displays on one page share one connection to the kernel. */
export function widget<Options>(view: View<Options>): Widget {
  const clusters = new WeakMap<Model, Cluster>();
  return {
    render({ model, el }) {
      const cluster = clusters.get(model) ?? connected(model);
      clusters.set(model, cluster);
      const root = h("div", { class: "mnb-v" });
      el.append(root);
      const end = view(cluster, root, (model.get("options") ?? {}) as Options);
      const check = (): void => cluster.check();
      const gone = (event: Event): void => {
        if ((event as CustomEvent<unknown>).detail === cluster.engine) cluster.lost(say`the kernel was restarted`);
      };
      document.addEventListener(BACK, check);
      document.addEventListener(GONE, gone);
      return () => {
        document.removeEventListener(BACK, check);
        document.removeEventListener(GONE, gone);
        end();
        root.remove();
      };
    },
  };
}

function connected(model: Model): Cluster {
  const channel = {
    send: (message: object) => model.send(message),
    onMessage: (callback: (message: FromKernel) => void) => {
      model.on("msg:custom", callback);
      return () => model.off("msg:custom", callback);
    },
  };
  return new Cluster(channel, model.get("saved") ?? undefined);
}
