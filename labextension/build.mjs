// Bundles the front ends: `node build.mjs panel` for JupyterLab's builder, `node build.mjs widgets [FOLDER]` for the wheel.
// `node build.mjs phrases FILE` writes the catalogue of phrases for translators.

import { copyFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const VIEWS = ["debug", "failures", "history", "logs", "mesh", "metrics", "panel", "profiles", "tensors", "timeline", "transfers"];
const SHIPPED = fileURLToPath(new URL("../kernel_ext/monarch_kernel/static/", import.meta.url));
const MADE = "Made by `make setup` from labextension/src: change it there.";

const common = { absWorkingDir: fileURLToPath(new URL(".", import.meta.url)), bundle: true, charset: "utf8", format: "esm", logLevel: "warning", target: "es2022" };

/** One module and one style sheet for each view: nothing is fetched when they run. */
async function widgets(folder) {
  const entryPoints = VIEWS.map((view) => `src/widgets/${view}.ts`);
  const banner = { js: `// ${MADE}`, css: `/* ${MADE} */` };
  await build({ ...common, entryPoints, outdir: folder, banner, minify: true, legalComments: "inline" });
  await copyFile(fileURLToPath(new URL("node_modules/uplot/LICENSE", import.meta.url)), `${folder}/uPlot.LICENSE`);
}

/** What JupyterLab has already stays an import. */
async function panel() {
  await build({ ...common, entryPoints: { index: "src/panel/index.ts" }, outdir: "lib", packages: "external" });
}

const [what, folder = SHIPPED] = process.argv.slice(2);
if (what === "phrases") await writeFile(folder, (await import("./phrases.mjs")).catalogue());
else await (what === "widgets" ? widgets(folder) : panel());
