// The open sections of the panel, as stored by this browser.

const KEPT = "monarch-nb:sections";
const USUAL = ["meshes", "selected"];

export function openSections(): Set<string> {
  try {
    const stored = JSON.parse(localStorage.getItem(KEPT) ?? "null") as string[] | null;
    if (stored) return new Set(stored.map((id) => id.replace(/^mnb-section-/, "")));
  } catch {
    // Nothing readable: the defaults.
  }
  return new Set(USUAL);
}

export function keepOpen(sections: readonly string[]): void {
  try {
    localStorage.setItem(KEPT, JSON.stringify(sections.map((id) => `mnb-section-${id}`)));
  } catch {
    // Without storage the next page has the defaults.
  }
}
