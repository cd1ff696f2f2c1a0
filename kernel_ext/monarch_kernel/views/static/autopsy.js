// Looking into the frames of a failure: the debugger's own commands, line by line, on the rank where it was raised.

import { h } from "./words.js";

/** A small prompt; `about` is {mesh, ranks} of a failure. `closed` is called when it is closed. */
export function autopsy(cluster, about, closed) {
  const output = h("pre", { class: "mnb-lines mnb-frames", tabindex: "0", "aria-label": "frames", text: "…" });
  const input = h("input", { class: "mnb-pick mnb-command", "aria-label": "command of the debugger", placeholder: "p x · up · where · any Python", spellcheck: "false", autocomplete: "off" });
  const close = h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": "close" });
  const element = h("div", { class: "mnb-autopsy" }, output, h("div", { class: "mnb-ask" }, h("code", { text: "»" }), input, close));
  const past = [];
  let at = 0;
  let sessions = null;

  const ask = (what) => cluster.request("debug", { sessions, ...what });
  const said = (text) => (output.textContent = `${output.textContent.trimEnd()}\n${text}`);

  async function open() {
    try {
      ({ sessions } = await cluster.request("post_mortem", about));
      output.textContent = (await ask({ do: "command", text: "ll" })).text.trimEnd();
      const { locals } = await ask({ do: "locals" });
      said(`\n${locals.map(({ name, values }) => `${name} = ${values[0].text}`).join("\n")}`);
      output.scrollTop = 0;
    } catch (error) {
      output.textContent = error.message;
      input.disabled = true;
    }
  }

  async function send(command) {
    try {
      said(`» ${command}\n${(await ask({ do: "command", text: command })).text}`);
    } catch (error) {
      said(`» ${command}\n${error.message}`);
    }
    output.scrollTop = output.scrollHeight;
  }

  input.addEventListener("keydown", (event) => {
    event.stopPropagation(); // what is typed here is no command of the notebook
    if (event.key === "Enter" && input.value.trim()) {
      past.push(input.value);
      at = past.length;
      send(input.value);
      input.value = "";
    } else if (event.key === "ArrowUp" && at > 0) input.value = past[--at];
    else if (event.key === "ArrowDown" && at < past.length) input.value = past[++at] ?? "";
  });
  close.addEventListener("click", () => {
    if (sessions) ask({ do: "continue" }).catch(() => {}); // lets go of the frames; the actor has gone on long since
    element.remove();
    closed?.();
  });
  open();
  return element;
}
