// Pages may forbid modules that come from the kernel (a policy without `blob:` for scripts), or have another version of
// anywidget than the kernel. Widgets then are empty, or a broken picture: the form that is saved with them is shown in
// their place, with a note.

import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import type { KernelMessage } from "@jupyterlab/services";
import type { Widget } from "@lumino/widgets";

import { h } from "../page/dom";
import { say } from "../page/language";

const WIDGET = "application/vnd.jupyter.widget-view+json";
const OURS = /class="mnb[ "]/;
const forbidden = (): string => say`This page does not allow the kernel's displays to run (its Content-Security-Policy forbids blob: scripts). State when the cell ran:`;
const broken = (): string => say`JupyterLab could not load the kernel's display, perhaps because its version of anywidget differs from the kernel's. State when the cell ran:`;
const ERROR = ".jupyter-widgets-error-widget"; // shown by JupyterLab's manager of widgets instead
const SOON_MS = 1000;

interface Output {
  data: Record<string, unknown>;
}

interface Area {
  widgets: readonly Widget[];
  model: { length: number; get(index: number): Output & IRenderMime.IMimeModel };
}

/** Whether a report of the browser concerns a module of a widget. */
export function isRefusal({ blockedURI, effectiveDirective }: Pick<SecurityPolicyViolationEvent, "blockedURI" | "effectiveDirective">): boolean {
  return blockedURI.startsWith("blob") && effectiveDirective.startsWith("script-src");
}

/** Whether an output is a display of ours whose widget is empty. */
export function isEmpty(data: Record<string, unknown>, node: Element): boolean {
  const html = data["text/html"];
  const text = Array.isArray(html) ? html.join("") : html;
  return WIDGET in data && typeof text === "string" && OURS.test(text) && !node.querySelector(".mnb-v, .mnb-saved-form");
}

/** Follows all notebooks. */
export function showSavedForms(tracker: INotebookTracker): void {
  let refused = false;
  let waits: ReturnType<typeof setTimeout> | undefined;
  const soon = (): void => {
    waits ??= setTimeout(() => {
      waits = undefined;
      tracker.forEach((panel) => fill(panel, refused));
    }, SOON_MS);
  };
  const onMessage = (_: unknown, message: KernelMessage.IMessage): void => {
    if (message.header.msg_type === "display_data" || message.header.msg_type === "execute_result") soon();
  };
  const follow = (panel: NotebookPanel): void => void panel.sessionContext.iopubMessage.connect(onMessage);
  tracker.forEach(follow);
  tracker.widgetAdded.connect((_, panel) => follow(panel));
  document.addEventListener("securitypolicyviolation", (event) => {
    if (!isRefusal(event)) return;
    refused = true;
    soon();
  });
}

function fill(panel: NotebookPanel, refused: boolean): void {
  for (const cell of panel.content.widgets) {
    const area = (cell as unknown as { outputArea?: Area }).outputArea;
    if (!area) continue;
    for (let index = 0; index < Math.min(area.widgets.length, area.model.length); index++) {
      const model = area.model.get(index);
      const { node } = area.widgets[index] as Widget;
      if (!isEmpty(model.data, node) || !(refused || node.querySelector(ERROR))) continue;
      const renderer = panel.content.rendermime.createRenderer("text/html");
      const form = h("div", { class: "mnb-saved-form" }, h("div", { class: "mnb-dim", text: refused ? forbidden() : broken() }), renderer.node);
      const output = node.querySelector<HTMLElement>(".jp-OutputArea-output");
      if (output) output.style.display = "none"; // the widget's own message is for its authors
      (output?.parentElement ?? node).append(form);
      void renderer.renderModel(model);
    }
  }
}
