// How things are said, and small helpers for the page.

export const STATES = ["failed", "unresponsive", "paused", "healing", "starting", "busy", "idle", "stopped"];
export const SIGNS = { failed: "✕", healing: "↻", paused: "❚❚", unresponsive: "…", starting: "◦", stopped: "–" };

/** Makes an element: h("div", {class: "x", onclick: f}, child, "text"). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes text only where it changes: no needless layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(number) {
  if (number >= 1 << 30) return `${(number / (1 << 30)).toFixed(1)} GB`;
  return `${Math.round(number / (1 << 20))} MB`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function placeOf(labels, point) {
  return labels.map((label, d) => `${label}=${point[d]}`).join(" ");
}

export function shapeOf(mesh) {
  return mesh.labels.map((label, d) => `${label}=${mesh.sizes[d]}`).join(" ") || "one";
}

/** Copies text; the button says that it did. */
export function copyButton(label, text) {
  const button = h("button", { class: "mnb-b", type: "button", text: label });
  button.addEventListener("click", async () => {
    const said = (await copied(text())) ? "copied" : "select it and copy";
    button.textContent = said;
    setTimeout(() => (button.textContent = label), 1200);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** How a failure stands, in words. */
export function endOf(state) {
  return state === "open" ? "not healed" : state;
}

/** Who was told of a failure, in words. */
export function tellingOf(who, how) {
  if (who === "<root>") return "shown here, since no call waited";
  if (who === "a call") return "raised by the call that waited";
  return `${who} ${how === "asked" ? "was asked" : how === "handled" ? "handled it" : "did not handle it"}`;
}

/** Buttons that ask, and the line that says what came of it. */
export function actionBar() {
  const message = h("div", { class: "mnb-message", role: "status" });
  const tell = (text, wrong) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", Boolean(wrong));
  };
  return { message, tell, ask: (label, ask, attributes) => askButton(label, ask, tell, attributes) };
}

/** A button that asks the kernel for something, and waits with its own label. */
export function askButton(label, ask, tell, attributes = {}) {
  const button = h("button", { class: "mnb-b", type: "button", text: label, ...attributes });
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    button.classList.add("mnb-waits");
    try {
      const result = await ask();
      tell(result?.text ?? "", false);
    } catch (error) {
      tell(error.message, true);
    } finally {
      button.removeAttribute("aria-disabled");
      button.classList.remove("mnb-waits");
    }
  });
  return button;
}
