import { describe, expect, it } from "vitest";

import { isEmpty, isRefusal } from "../../src/panel/refused";

const ours = { "application/vnd.jupyter.widget-view+json": {}, "text/html": '<div class="mnb"><style></style>workers</div>' };

describe("a page that forbids modules of the kernel", () => {
  it.each([
    ["blob", "script-src-elem", true],
    ["blob:http://x/1", "script-src", true],
    ["blob", "worker-src", false],
    ["https://elsewhere/x.js", "script-src-elem", false],
    ["eval", "script-src", false],
  ])("%s under %s", (blockedURI, effectiveDirective, refused) => {
    expect(isRefusal({ blockedURI, effectiveDirective })).toBe(refused);
  });

  it("is told from the outputs of others, and from displays that have come", () => {
    const node = document.createElement("div");
    expect(isEmpty(ours, node)).toBe(true);
    expect(isEmpty({ "text/html": ours["text/html"] }, node)).toBe(false);
    expect(isEmpty({ ...ours, "text/html": ["<b>", "other</b>"] }, node)).toBe(false);
    node.innerHTML = '<div class="mnb-v"></div>';
    expect(isEmpty(ours, node)).toBe(false);
  });
});
