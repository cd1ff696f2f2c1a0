// Findings on lack of progress or slow ranks: requested by a click, and shown below it.

import type { Cluster } from "../cluster/client";
import type { Diagnosis, Finding, RankPhases } from "../cluster/messages";
import { askButton, messageLine } from "../page/buttons";
import { h } from "../page/dom";
import { phrase, say } from "../page/language";

import "./findings.css";

const PHASES = ["data iterator", "forward", "backward", "optimizer", "other", "garbage collection", "replies", "collective", "idle"] as const;
const nothing = (): string => say`Why? names the ranks that hold others up, with the lines at which they are. Slow ranks? compares the phases of their steps for 3 seconds.`;

/** Buttons and their findings, about one mesh or all active ones; with `ask` asks at once. The result ends it. */
export function findingsView(cluster: Cluster, root: HTMLElement, { mesh, ask = false }: { mesh?: string | undefined; ask?: boolean } = {}): () => void {
  const content = mesh === undefined ? {} : { mesh };
  const { message, report } = messageLine();
  const list = h("div", {}, h("div", { class: "mnb-dim", text: nothing() }));
  const show = (diagnosis: Diagnosis, phases: readonly RankPhases[] = []): Diagnosis => {
    abort.hidden = !diagnosis.findings.length;
    list.replaceChildren(...diagnosis.findings.map(findingRow), ...(phases.length ? [phaseStrip(phases)] : []), h("div", { class: "mnb-dim", text: say`inspected: ${diagnosis.inspected}` }));
    return diagnosis;
  };
  const why = askButton(say`Why?`, async () => show(await cluster.request("why", content)), report, { title: say`which ranks hold others up, and where they are` });
  const slow = askButton(
    say`Slow ranks?`,
    async () => {
      const compared = await cluster.request("slow", content);
      return show(compared, compared.phases);
    },
    report,
    { title: say`compares the phases of the ranks' steps for 3 seconds` },
  );
  const abort = askButton(say`End these calls`, async () => show(await cluster.request("abort", content)), report, { title: say`the calls that wait for these ranks fail with the finding; the processes live on` });
  abort.hidden = true;
  root.classList.add("mnb-findings");
  root.append(h("div", { class: "mnb-buttons" }, why, slow, abort), list, message);
  if (ask) why.click();
  return () => root.replaceChildren();
}

function findingRow(finding: Finding): HTMLElement {
  const kind = `${finding.kind.replaceAll("_", " ")}${finding.perhaps ? ", perhaps" : ""}`;
  return h("div", { class: "mnb-finding", "data-sure": String(finding.sure) }, h("b", { text: kind }), h("span", { class: "mnb-dim", text: ` · ${finding.mesh}` }), h("div", { text: finding.text }));
}

/** A bar for each rank: its time by phases. */
export function phaseStrip(ranks: readonly RankPhases[]): HTMLElement {
  const used = PHASES.filter((phase) => ranks.some(({ shares }) => (shares[phase] ?? 0) >= 0.005));
  const meshes = new Set(ranks.map(({ mesh }) => mesh));
  const rows = ranks.map(({ mesh, where, shares }) => {
    const parts = used.map((phase) => ({ phase, share: shares[phase] ?? 0 })).filter(({ share }) => share > 0);
    const label = parts.map(({ phase, share }) => `${phrase(phase)} ${Math.round(100 * share)} %`).join(", ");
    const bar = parts.map(({ phase, share }) => h("i", { "data-phase": phase, style: `width: ${(100 * share).toFixed(2)}%` }));
    const name = meshes.size > 1 ? `${mesh} ${where}` : where;
    return h("tr", {}, h("th", { scope: "row", text: name }), h("td", { title: label }, h("div", { class: "mnb-phases", role: "img", "aria-label": label }, ...bar)));
  });
  const legend = used.map((phase) => h("span", {}, h("i", { class: "mnb-phase", "data-phase": phase }), phrase(phase)));
  return h("div", { class: "mnb-strip" }, h("table", {}, h("tbody", {}, ...rows)), h("div", { class: "mnb-dim mnb-legend" }, ...legend));
}
