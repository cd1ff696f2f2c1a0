import { afterEach, expect, it } from "vitest";

import { allPhrases, catalogue, phrasesIn } from "../phrases.mjs";
import { phrase, plural, say, setLanguage } from "../src/page/language";

afterEach(() => setLanguage(undefined));

/** What JupyterLab's translator does with a small language pack. */
const pack: Record<string, string[]> = {
  Heal: ["Heilen"],
  "stopping %1 …": ["%1 wird beendet …"],
  "%1 rank": ["%1 Rang", "%1 Ränge"],
};
const filled = (text: string, values: unknown[]): string => text.replace(/%(\d+)/g, (_, nth: string) => String(values[Number(nth) - 1]));
const german = {
  __: (text: string, ...values: unknown[]) => filled(pack[text]?.[0] ?? text, values),
  _n: (one: string, many: string, count: number) => filled(pack[one]?.[Number(count !== 1)] ?? (count === 1 ? one : many), [count]),
};

it("phrases are in the language of the page, with their values", () => {
  const all = (): string[] => [phrase("Heal"), say`stopping ${"workers"} …`, plural(1, "rank"), plural(3, "rank"), say`${2} of ${3}`];
  expect(all()).toEqual(["Heal", "stopping workers …", "1 rank", "3 ranks", "2 of 3"]);
  setLanguage(german);
  expect(all()).toEqual(["Heilen", "workers wird beendet …", "1 Rang", "3 Ränge", "2 of 3"]);
});

it("every phrase that a person sees goes through the translator", () => {
  expect(allPhrases().flatMap(({ file, passed }) => passed.map(({ text, line }) => `${file}:${line}: ${text}`))).toEqual([]);
});

it("finds phrases that pass by", () => {
  const source = 'h("b", { class: "mnb-b big", title: "Stop" }, "and more");\nsetText(node, count ? `${count} are left` : "");\nthrow new Error("no kernel is there");\nsay`all of it`;\ncode(`%heal ${name} here`);';
  expect(phrasesIn("some.ts", source).passed.map(({ text, line }) => [line, text])).toEqual([[1, "Stop"], [1, "and more"], [2, "%1 are left"], [3, "no kernel is there"]]);
});

it("the catalogue has them all, with their places", () => {
  const text = catalogue();
  expect(text).toMatch(/#: src\/panel\/actions\.ts:\d+.*\nmsgid "spawning %1 …"\nmsgstr ""/);
  expect(text).toContain('msgid "%1 rank"\nmsgid_plural "%1 ranks"');
  expect(text).toContain('msgid "brings failed ranks back, with their actors"');
});
