// Phrases in the language of the page. JupyterLab's translator has them, where there is one and a language pack with the
// domain `monarch_nb_lab`; else they are as they are written here. `node build.mjs phrases FILE` writes all of them.

export const DOMAIN = "monarch_nb_lab";

/** The phrases of JupyterLab's translator for a domain. */
export interface Phrases {
  __(phrase: string, ...values: unknown[]): string;
  _n(one: string, many: string, count: number, ...values: unknown[]): string;
}

// Displays in cells are modules of their own: they find the panel's translator here.
const SHARED = Symbol.for("monarch-nb:phrases");
const page = globalThis as unknown as Record<symbol, Phrases | undefined>;

export function setLanguage(phrases: Phrases | undefined): void {
  page[SHARED] = phrases;
}

/** A phrase that is a constant. */
export function phrase(text: string): string {
  return page[SHARED]?.__(text) ?? text;
}

/** A phrase with values in it: say`stopping ${name} …` is looked up as "stopping %1 …". */
export function say(parts: TemplateStringsArray, ...values: unknown[]): string {
  const text = parts.reduce((template, part, index) => `${template}%${index}${part}`);
  return page[SHARED]?.__(text, ...values) ?? parts.reduce((result, part, position) => `${result}${String(values[position - 1])}${part}`);
}

/** `3 ranks`, `1 rank`. */
export function plural(count: number, word: string, words = `${word}s`): string {
  return page[SHARED]?._n(`%1 ${word}`, `%1 ${words}`, count) ?? `${count} ${count === 1 ? word : words}`;
}
