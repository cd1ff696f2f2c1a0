// Buttons that send a request to the kernel, and the line that shows the result.

import type { Said } from "../cluster/messages";
import { say } from "./language";
import { h } from "./dom";

export type Report = (text: string, wrong?: boolean) => void;
type Ask = () => Promise<Said | void>;

/** A line that shows the result of a click. */
export function messageLine(): { message: HTMLElement; report: Report } {
  const message = h("div", { class: "mnb-message", role: "status" });
  const report: Report = (text, wrong = false) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", wrong);
  };
  return { message, report };
}

/** A button that sends a request; disabled until the reply arrives. */
export function askButton(label: string, ask: Ask, report: Report, attributes: Record<string, unknown> = {}): HTMLButtonElement {
  const button = h("button", { class: "mnb-b", type: "button", text: label, ...attributes });
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    button.classList.add("mnb-waits");
    try {
      const result = await ask();
      report(result?.text ?? "");
    } catch (error) {
      report((error as Error).message, true);
    } finally {
      button.removeAttribute("aria-disabled");
      button.classList.remove("mnb-waits");
    }
  });
  return button;
}

/** A button that copies text and confirms it in its label. */
export function copyButton(label: string, text: () => string): HTMLButtonElement {
  const button = h("button", { class: "mnb-b", type: "button", text: label });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "copied" : say`select it and copy`;
    setTimeout(() => (button.textContent = label), 1200);
  });
  return button;
}

async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy"); // for pages without access to the clipboard
    area.remove();
    return isCopied;
  }
}
