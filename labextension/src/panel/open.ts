// Which sections of the panel are open, as this browser has kept it.

const KEPT = "monarch-nb:sections";
const USUAL = ["meshes", "selected"];

export function openSections(): Set<string> {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "null") as string[] | null;
    if (kept) return new Set(kept.map((id) => id.replace(/^mnb-section-/, "")));
  } catch {
    // Nothing that can be read: as usual.
  }
  return new Set(USUAL);
}

export function keepOpen(sections: readonly string[]): void {
  try {
    localStorage.setItem(KEPT, JSON.stringify(sections.map((id) => `mnb-section-${id}`)));
  } catch {
    // Where a page may store nothing, they are as usual in the next one.
  }
}
