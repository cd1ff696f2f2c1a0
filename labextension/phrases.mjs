// The phrases of the panel, as a catalogue for translators has them, and those that no translator would see.

import { readFileSync, readdirSync } from "node:fs";

import ts from "typescript";

const SOURCES = ["panel", "page", "views", "cluster"];
const SAY = "say"; // say`stopping ${name} …` is looked up as "stopping %1 …"
const PLURAL = "plural"; // plural(count, "rank") as "%1 rank" and "%1 ranks"
// Constants, which are read before a page says its language, are looked up where they are shown: phrase(action.label).
const CONSTANT = new Set(["label", "hint", "waiting", "example", "title"]);
// Attributes and properties that a person reads, and those that none does.
const SEEN = new Set(["text", "title", "label", "placeholder", "aria-label", "aria-roledescription", "caption"]);
const UNSEEN = new Set(["class", "style", "d", "keys", "selector", "viewBox", "points", "transform", "rel", "href", "src", "accept", "code", "type", "topic", "role", "scope", "description", "category", "key"]);
const NAMES = new Set(["Monarch", "Pss", "Actor", "ll", "data iterator", "garbage collection"]); // the same in every language, and keys of phases
const CODE = /^[%!#.[@<]|^\w+=\S+( \w+=\S+)*$/;
// Calls whose words no person reads.
const QUIET = /(classList\.\w+|addClass|removeClass|toggleClass|querySelector(All)?|closest|matches|locator|warn|debug|getContext|getPropertyValue|setProperty|cssText|svg|test|exec|RegExp|import|addFactory)$/;
const SENTENCE = /\p{L}{2,}[^\p{L}]*\s.*\p{L}|\p{L}.*…|^\p{Lu}\p{Ll}+$/su;

const textOf = (node) => {
  if (ts.isStringLiteral(node) || ts.isNoSubstitutionTemplateLiteral(node)) return node.text;
  return ts.isTemplateExpression(node) ? node.templateSpans.reduce((text, span, at) => `${text}%${at + 1}${span.literal.text}`, node.head.text) : null;
};

/** The name of the attribute or property that a value is of. */
const propertyOf = (node) => (ts.isPropertyAssignment(node.parent) && node.parent.initializer === node ? node.parent.name.text ?? "" : "");

function quiet(node) {
  for (let at = node; at.parent; at = at.parent) {
    const { parent } = at;
    if (ts.isImportDeclaration(parent) || ts.isExportDeclaration(parent) || ts.isLiteralTypeNode(parent) || ts.isTypeNode(parent) || (ts.isCaseClause(parent) && at === parent.expression) || ts.isElementAccessExpression(parent)) return true;
    if (ts.isPropertyAssignment(parent) && (at === parent.name || UNSEEN.has(parent.name.text ?? ""))) return true;
    if (ts.isBinaryExpression(parent) && (/===|!==/.test(parent.operatorToken.getText()) || /\.style\.|className$/.test(parent.left.getText()))) return true;
    if (ts.isCallExpression(parent) && at !== parent.expression && QUIET.test(parent.expression.getText())) return true;
    if (ts.isBlock(parent) || ts.isArrowFunction(parent)) break;
  }
  return false;
}

/** Whether a short word is where a person reads it. */
function shown(node) {
  if (SEEN.has(propertyOf(node))) return true;
  for (let at = node; at.parent && !ts.isBlock(at.parent); at = at.parent) {
    const { parent } = at;
    if (!ts.isCallExpression(parent)) {
      if (ts.isArrayLiteralExpression(parent) && parent.elements.length === 2 && /facts\.push/.test(parent.parent.getText())) return at === parent.elements[0];
      if (ts.isConditionalExpression(parent) || ts.isParenthesizedExpression(parent) || ts.isTemplateSpan(parent) || ts.isTemplateExpression(parent)) continue;
      return ts.isPropertyAssignment(parent) && SEEN.has(parent.name.text ?? "");
    }
    const name = parent.expression.getText();
    const nth = parent.arguments.indexOf(at);
    return (name === "h" && nth >= 2) || (name === "setText" && nth === 1) || (/(askButton|copyButton)$/.test(name) && nth === 0);
  }
  return false;
}

/** What a file says: `said` can be translated, `passed` cannot, with the line of each. */
export function phrasesIn(file, source) {
  const tree = ts.createSourceFile(file, source, ts.ScriptTarget.ES2022, true);
  const said = [];
  const passed = [];
  const line = (node) => tree.getLineAndCharacterOfPosition(node.getStart()).line + 1;
  const visit = (node) => {
    if (ts.isTaggedTemplateExpression(node) && node.tag.getText() === SAY) said.push({ id: textOf(node.template), line: line(node) });
    else if (ts.isCallExpression(node) && node.expression.getText() === PLURAL && node.arguments[1] && ts.isStringLiteral(node.arguments[1])) {
      const [, one, many] = node.arguments;
      said.push({ id: `%1 ${one.text}`, many: `%1 ${many ? textOf(many) : `${one.text}s`}`, line: line(node) });
      return visit(node.arguments[0]);
    } else {
      const text = textOf(node);
      if (text !== null && !ts.isTaggedTemplateExpression(node.parent) && !quiet(node)) {
        const words = text.replace(/%\d+/g, "");
        const constant = file.endsWith("table.ts") && CONSTANT.has(propertyOf(node));
        if (constant) said.push({ id: text, line: line(node) });
        else if (!CODE.test(words.trim()) && !NAMES.has(text) && (SENTENCE.test(words) || (shown(node) && /\p{L}{2}/u.test(words)))) passed.push({ text, line: line(node), start: node.getStart() });
      }
    }
    ts.forEachChild(node, visit);
  };
  visit(tree);
  return { said, passed };
}

/** All files that say something to a person. */
export function allPhrases(root = "src/") {
  return SOURCES.flatMap((folder) =>
    readdirSync(`${root}${folder}`).filter((name) => name.endsWith(".ts")).sort().map((name) => ({ file: `${root}${folder}/${name}`, ...phrasesIn(name, readFileSync(`${root}${folder}/${name}`, "utf8")) })),
  );
}

/** The catalogue, in the format of gettext. */
export function catalogue() {
  const places = new Map();
  for (const { file, said } of allPhrases())
    for (const { id, many = "", line } of said) places.set(JSON.stringify([id, many]), [...(places.get(JSON.stringify([id, many])) ?? []), `${file}:${line}`]);
  const entries = [...places].map(([key, where]) => {
    const [id, many] = JSON.parse(key).map((text) => JSON.stringify(text));
    return `#: ${where.join(" ")}\nmsgid ${id}\n${many === '""' ? 'msgstr ""' : `msgid_plural ${many}\nmsgstr[0] ""\nmsgstr[1] ""`}\n`;
  });
  return ['msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n', ...entries].join("\n");
}
