// The plugin: all its dependencies are optional, so that it also loads in Notebook 7.

import "../views/base.css";

import { ILabShell, ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette, IToolbarWidgetRegistry } from "@jupyterlab/apputils";
import { ILauncher } from "@jupyterlab/launcher";
import { INotebookTracker } from "@jupyterlab/notebook";
import { ISettingRegistry } from "@jupyterlab/settingregistry";
import type { KernelSpec } from "@jupyterlab/services";
import { IStatusBar } from "@jupyterlab/statusbar";
import { ITranslator } from "@jupyterlab/translation";
import type { Widget } from "@lumino/widgets";

import { DOMAIN, setLanguage } from "../page/language";
import { say } from "../page/language";
import { Actions, type Page } from "./actions";
import { addCommand, addCommands, openMenu } from "./commands";
import { EndNotices } from "./ended";
import { Front } from "./front";
import { guardQuestions } from "./guard";
import { icon } from "./icon";
import { labDialogs } from "./labdialogs";
import { phaseOf } from "./link";
import { activeCodeOf, askWhere, offerInCells } from "./oncell";
import { MonarchPanel } from "./panel";
import { RanksSection, joinDebugger } from "./ranks";
import { showSavedForms } from "./refused";
import { StatusItem } from "./status";

import "./panel.css";

const ID = "monarch-nb-lab:plugin";
const NEW_NOTEBOOK = "monarch-nb:new-notebook";

interface Settings {
  insertCode: "offer" | "always";
  loadAgain: boolean;
  statusBar: boolean;
  desktopNotifications: boolean;
}

/** The kernel of a new notebook: the usual one, if that is Python's. */
function pythonOf(specs: KernelSpec.ISpecModels | null): string {
  const byName = specs?.kernelspecs ?? {};
  const usual = specs?.default ?? "";
  return byName[usual]?.language === "python" ? usual : Object.keys(byName).find((name) => byName[name]?.language === "python") ?? "python3";
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: "The cluster of the current notebook: its meshes, failures, debug sessions and logs.",
  autoStart: true,
  optional: [INotebookTracker, ICommandPalette, ILabShell, ILayoutRestorer, ISettingRegistry, IStatusBar, IToolbarWidgetRegistry, ILauncher, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker | null,
    palette: ICommandPalette | null,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    registry: ISettingRegistry | null,
    statusBar: IStatusBar | null,
    toolbars: IToolbarWidgetRegistry | null,
    launcher: ILauncher | null,
    translator: ITranslator | null,
  ): void => {
    if (!tracker) return; // no notebooks, no clusters
    setLanguage(translator?.load(DOMAIN));
    const open = (): void => {
      app.shell.activateById(panel.id);
    };
    const settings: Settings = { insertCode: "offer", loadAgain: false, statusBar: true, desktopNotifications: false };
    guardQuestions(tracker);
    showSavedForms(tracker);
    const front = new Front(tracker, () => settings.loadAgain);
    const page: Page = {
      show: (what, on) => {
        open();
        return panel.parts.show(what, on);
      },
      cell: () => front.cell,
      writes: () => true,
      write: (code, run) => {
        if (run) void front.run(code);
        else front.insert(code);
        return true;
      },
    };
    const actions = new Actions(
      () => front.connection?.cluster ?? null,
      page,
      labDialogs,
      (code) => settings.insertCode === "always" && front.insert(code),
    );
    const panel = new MonarchPanel(front, actions, {
      load: () => void front.connection?.load(),
      spawn: () => void actions.spawn(),
      menu: (x, y) => openMenu(app, x, y),
    });
    app.shell.add(panel, labShell ? "left" : "right", { rank: 650, type: "Monarch" });
    restorer?.add(panel, "monarch-nb-panel");
    addCommands(
      app,
      front,
      actions,
      { open, failures: () => panel.showFailures(), findings: () => panel.ask(), codes: () => panel.showCodes(), selected: () => panel.parts.meshes.view.row },
      palette,
    );
    addCommand(app, palette, NEW_NOTEBOOK, {
      label: say`Notebook with a Mesh`,
      caption: say`A new notebook with Monarch loaded, and a mesh`,
      icon,
      execute: async ({ cwd }) => {
        open();
        await app.commands.execute("notebook:create-new", { cwd: cwd ?? null, kernelName: pythonOf(app.serviceManager.kernelspecs.specs) });
        if (await front.load()) await actions.spawn();
      },
    });
    launcher?.add({ command: NEW_NOTEBOOK, category: "Notebook", rank: 1 });
    if (toolbars) offerInCells(toolbars, front);
    addCommand(app, palette, "monarch-nb:where", {
      label: say`Choose Where the Active Cell Runs…`,
      isEnabled: () => Boolean(activeCodeOf(front.notebook) && front.connection && phaseOf(front.connection.facts) === "live"),
      execute: async () => {
        const cell = activeCodeOf(front.notebook);
        if (!cell || !front.connection) return;
        await askWhere(cell, front.connection.cluster.state);
        front.notebook?.activate(); // the palette, which had the focus, is closed
      },
    });
    const ranks = new RanksSection(front);
    const sidebars = (): Widget[] => [...app.shell.widgets("right"), ...app.shell.widgets("left")];
    void app.restored.then(() => joinDebugger(sidebars, ranks));
    const status = statusBar ? new StatusItem(front, open) : null;
    if (status) statusBar?.registerStatusItem("monarch-nb:status", { item: status, align: "left", rank: 50, isActive: () => status.isActive, activeStateChanged: status.activeChanged });

    const ends = new EndNotices(front, settings, (text, wrong) => status?.announce(text, wrong), ({ id }) => app.shell.activateById(id));
    addCommand(app, palette, "monarch-nb:notify", {
      label: say`Show Ends of Long Cells on the Desktop`,
      isToggled: () => settings.desktopNotifications,
      execute: () => {
        settings.desktopNotifications = !settings.desktopNotifications;
        if (settings.desktopNotifications) ends.permit(true);
        return registry?.set(ID, "desktopNotifications", settings.desktopNotifications);
      },
    });

    const take = (changed: ISettingRegistry.ISettings): void => {
      Object.assign(settings, changed.composite);
      if (status) status.wanted = settings.statusBar;
    };
    void registry
      ?.load(ID)
      .then((loaded) => {
        take(loaded);
        loaded.changed.connect(take);
      })
      .catch((reason) => console.warn(`monarch-nb: the settings cannot be read: ${reason}`));
  },
};

export default plugin;
