// Inspection of the frames of a failure: the debugger's own commands, line by line, on the rank where it was raised.

import type { Cluster } from "../cluster/client";
import type { DebugCommand } from "../cluster/messages";
import { h } from "../page/dom";
import { say } from "../page/language";

/** A small prompt on the frames of a failure. `closed` is called when it is closed. */
export function postMortem(cluster: Cluster, about: { mesh: string; ranks: number[]; call?: string | undefined }, closed: () => void): HTMLElement {
  const output = h("pre", { class: "mnb-lines mnb-frames", tabindex: "0", "aria-label": say`frames`, text: "…" });
  const input = h("input", { class: "mnb-pick mnb-command", "aria-label": say`command of the debugger`, placeholder: say`p x · up · where · any Python`, spellcheck: "false", autocomplete: "off" });
  const close = h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": say`close` });
  const element = h("div", { class: "mnb-postmortem" }, output, h("div", { class: "mnb-ask" }, h("code", { text: "»" }), input, close));
  const history: string[] = [];
  let position = 0;
  let sessions: string[] | null = null;

  const ask = (command: DebugCommand) => cluster.request("debug", { sessions, ...command });
  const write = (text: string): void => {
    output.textContent = `${output.textContent?.trimEnd()}\n${text}`;
  };

  async function open(): Promise<void> {
    try {
      ({ sessions } = await cluster.request("post_mortem", about));
      output.textContent = (await ask({ do: "command", text: "ll" })).text?.trimEnd() ?? "";
      const { locals = [] } = await ask({ do: "locals" });
      write(`\n${locals.map(({ name, values }) => `${name} = ${values[0]?.text}`).join("\n")}`);
      output.scrollTop = 0;
    } catch (error) {
      output.textContent = (error as Error).message;
      input.disabled = true;
    }
  }

  async function send(command: string): Promise<void> {
    try {
      write(`» ${command}\n${(await ask({ do: "command", text: command })).text ?? ""}`);
    } catch (error) {
      write(`» ${command}\n${(error as Error).message}`);
    }
    output.scrollTop = output.scrollHeight;
  }

  input.addEventListener("keydown", (event) => {
    event.stopPropagation(); // typed letters are no commands of the notebook
    if (event.key === "Enter" && input.value.trim()) {
      history.push(input.value);
      position = history.length;
      void send(input.value);
      input.value = "";
    } else if (event.key === "ArrowUp" && position > 0) input.value = history[--position] ?? "";
    else if (event.key === "ArrowDown" && position < history.length) input.value = history[++position] ?? "";
  });
  close.addEventListener("click", () => {
    if (sessions) void ask({ do: "continue" }).catch(() => undefined); // releases the frames; the actor has continued long before
    element.remove();
    closed();
  });
  void open();
  return element;
}
