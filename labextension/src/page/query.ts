// The query line: finds ranks by state, host, dimension or metric.

import { say } from "./language";
import { h } from "./dom";

export const FIND_FROM = 33; // ranks: fewer need no search

const words = (): string => say`States, hosts, endpoints, coordinates such as hosts=3 or gpus=0:4, ranks such as 12 or 4-7, measurements such as cpu>50% or memory>2GB; a rank must match all words`;

/** Calls `ask` with each change, `enter` where that is pressed; Escape empties it. The page's own keys are not meant. */
export function queryLine(ask: (query: string) => void, enter: () => void = () => undefined): HTMLInputElement {
  const input = h("input", { class: "mnb-query", type: "search", placeholder: say`find: failed, node17, gpus=0:4 …`, "aria-label": say`find ranks`, title: words(), spellcheck: "false" });
  input.addEventListener("input", () => ask(input.value));
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") enter();
    if (event.key !== "Escape") return;
    input.value = "";
    ask("");
  });
  return input;
}
