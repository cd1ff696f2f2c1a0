// Buttons that ask the kernel for something, and the line that says what came of it.

import type { Said } from "../cluster/messages";
import { h } from "./dom";

export type Tell = (text: string, wrong?: boolean) => void;
type Ask = () => Promise<Said | void>;

/** A line in which a view says what came of a click. */
export function messageLine(): { message: HTMLElement; tell: Tell } {
  const message = h("div", { class: "mnb-message", role: "status" });
  const tell: Tell = (text, wrong = false) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", wrong);
  };
  return { message, tell };
}

/** A button that asks the kernel for something, and waits with its own label. */
export function askButton(label: string, ask: Ask, tell: Tell, attributes: Record<string, unknown> = {}): HTMLButtonElement {
  const button = h("button", { class: "mnb-b", type: "button", text: label, ...attributes });
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    button.classList.add("mnb-waits");
    try {
      const result = await ask();
      tell(result?.text ?? "");
    } catch (error) {
      tell((error as Error).message, true);
    } finally {
      button.removeAttribute("aria-disabled");
      button.classList.remove("mnb-waits");
    }
  });
  return button;
}

/** Copies text; the button says that it did. */
export function copyButton(label: string, text: () => string): HTMLButtonElement {
  const button = h("button", { class: "mnb-b", type: "button", text: label });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "copied" : "select it and copy";
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
    const done = document.execCommand("copy"); // where the page may not write to the clipboard
    area.remove();
    return done;
  }
}
