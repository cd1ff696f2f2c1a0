// What the command palette, menus, and buttons in outputs can run.

import type { JupyterFrontEnd } from "@jupyterlab/application";
import type { ICommandPalette } from "@jupyterlab/apputils";
import type { ReadonlyPartialJSONObject } from "@lumino/coreutils";
import { Menu } from "@lumino/widgets";

import type { Actions, Verb } from "./actions";
import type { Dims } from "./code";
import type { Front } from "./front";
import { icon } from "./icon";
import { phaseOf } from "./link";
import { Row, targetOf } from "./tree";

export const IDS = {
  open: "monarch-nb:open",
  load: "monarch-nb:load",
  spawn: "monarch-nb:spawn",
  heal: "monarch-nb:heal",
  interrupt: "monarch-nb:interrupt",
  stop: "monarch-nb:stop",
  failures: "monarch-nb:failures",
  why: "monarch-nb:why",
  logs: "monarch-nb:logs",
  insert: "monarch-nb:insert-code",
} as const;

export interface Views {
  open(): void;
  failures(): void;
  ask(uid: string | undefined): void;
  logs(uid: string, ranks: number[] | null): void;
  selected(): Row | null;
}

interface Target {
  uid: string;
  ranks: number[] | null;
}

export function addCommands(app: JupyterFrontEnd, front: Front, actions: Actions, views: Views, palette: ICommandPalette | null): void {
  const { commands } = app;
  const live = (): boolean => Boolean(front.connection && phaseOf(front.connection.facts) === "live");

  /** The mesh that arguments name, by uid or by name; else what is selected in the panel. */
  function targetFrom(args: ReadonlyPartialJSONObject): Target | null {
    const mesh = typeof args.mesh === "string" ? args.mesh : "";
    const ranks = Array.isArray(args.ranks) ? (args.ranks as number[]) : null;
    if (!mesh) {
      const row = views.selected();
      return row && targetOf(row);
    }
    const meshes = front.connection?.cluster.state.meshes ?? {};
    if (mesh in meshes) return { uid: mesh, ranks };
    const named = Object.keys(meshes).find((uid) => meshes[uid]?.name === mesh && !meshes[uid]?.stopped);
    return { uid: named ?? mesh, ranks };
  }

  function what(args: ReadonlyPartialJSONObject): string {
    const target = targetFrom(args);
    const mesh = target && front.connection?.cluster.state.meshes[target.uid];
    return mesh ? ` ${mesh.name}` : "";
  }

  commands.addCommand(IDS.open, { label: "Show the Cluster of This Notebook", icon, execute: () => views.open() });
  commands.addCommand(IDS.load, {
    label: "Load Monarch into the Kernel",
    isEnabled: () => Boolean(front.connection && phaseOf(front.connection.facts) === "unloaded"),
    execute: () => front.connection?.load(),
  });
  commands.addCommand(IDS.spawn, {
    label: "Spawn a Mesh…",
    isEnabled: live,
    execute: (args) => {
      views.open();
      return actions.spawn(args.name as string | undefined, args.dims as Dims | undefined);
    },
  });
  const verbs: [Verb, string][] = [
    ["heal", "Heal"],
    ["interrupt", "Interrupt"],
    ["stop", "Stop"],
  ];
  for (const [verb, label] of verbs)
    commands.addCommand(IDS[verb], {
      label: (args) => (args.palette ? `${label} What Is Selected` : `${label}${what(args)}`),
      isEnabled: live,
      execute: (args) => {
        if (args.palette || args.mesh) views.open();
        if (verb === "heal" && args.all) return actions.healAll();
        const target = targetFrom(args);
        return target ? actions.act(verb, target.uid, target.ranks, verb === "interrupt" && Boolean(args.sure)) : undefined;
      },
    });
  commands.addCommand(IDS.failures, {
    label: "Show Failures",
    execute: () => {
      views.open();
      views.failures();
    },
  });
  commands.addCommand(IDS.why, {
    label: (args) => (args.palette ? "Why Does Nothing Move?" : `Why?${what(args)}`),
    isEnabled: live,
    execute: (args) => {
      views.open();
      views.ask(args.palette ? undefined : targetFrom(args)?.uid);
    },
  });
  commands.addCommand(IDS.logs, {
    label: (args) => (args.palette ? "Show Logs of the Selection" : "Show Logs"),
    isEnabled: live,
    execute: (args) => {
      views.open();
      const target = targetFrom(args);
      if (target) views.logs(target.uid, target.ranks);
    },
  });
  commands.addCommand(IDS.insert, {
    label: "Insert the Code of the Last Action",
    isEnabled: () => Boolean(actions.outcome.code),
    execute: () => front.insert(actions.outcome.code),
  });
  if (!palette) return;
  for (const command of [IDS.open, IDS.load, IDS.spawn, IDS.heal, IDS.interrupt, IDS.stop, IDS.failures, IDS.why, IDS.logs, IDS.insert])
    palette.addItem({ command, category: "Monarch", args: { palette: true } });
  palette.addItem({ command: IDS.heal, category: "Monarch", args: { all: true } });
}

/** The menu of a row of the tree. */
export function openMenu(app: JupyterFrontEnd, row: Row, event: MouseEvent): void {
  const menu = new Menu({ commands: app.commands });
  const { uid, ranks } = targetOf(row);
  const args = ranks === null ? { mesh: uid } : { mesh: uid, ranks };
  for (const command of [IDS.heal, IDS.interrupt, IDS.why, IDS.logs]) menu.addItem({ command, args });
  menu.addItem({ type: "separator" });
  menu.addItem({ command: IDS.stop, args });
  menu.aboutToClose.connect(() => setTimeout(() => menu.dispose(), 0));
  menu.open(event.clientX, event.clientY);
}
