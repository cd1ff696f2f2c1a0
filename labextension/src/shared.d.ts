// The types of what the widgets in cells and this panel share: kernel_ext/monarch_kernel/views/static.

declare module "*/static/cluster.js" {
  export const EMPTY: import("./state").ClusterState;
  export function applyPatch<T>(state: T, patch: unknown): T;
  export interface Channel {
    send(message: object): void;
    onMessage(callback: (message: any) => void): () => void;
  }
  export class Cluster {
    constructor(channel: Channel, saved?: { state: import("./state").ClusterState; now: number });
    readonly state: import("./state").ClusterState;
    readonly live: boolean;
    now(): number;
    watch(listener: (patch: any) => void): () => void;
    subscribe(wish: object, listener: (message: any) => void): () => void;
    request(verb: string, more?: object): Promise<any>;
    lost(why: string, forget?: boolean): void;
    found(): void;
  }
  export function rankOf(state: import("./state").ClusterState, uid: string, index: number): import("./state").Rank;
  export function pointOf(sizes: number[], index: number): number[];
  export function baseOf(mesh: import("./state").Mesh, index: number): number;
  export function indexOfBase(mesh: import("./state").Mesh, base: number): number;
  export function actorsOn(state: import("./state").ClusterState, uid: string, base: number): [string, import("./state").Mesh, number][];
  export function sliceExpression(name: string, labels: string[], sizes: number[], indices: number[]): string;
}

declare module "*/static/words.js" {
  export const STATES: import("./state").State[];
  export const SIGNS: Partial<Record<import("./state").State, string>>;
  export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes?: Record<string, unknown>, ...children: (Node | string | null | undefined)[]): HTMLElementTagNameMap[K];
  export function say(element: Element, text: string): void;
  export function plural(count: number, word: string): string;
  export function duration(seconds: number): string;
  export function bytes(number: number): string;
  export function clock(seconds: number): string;
  export function placeOf(labels: string[], point: number[]): string;
  export function shapeOf(mesh: import("./state").Mesh): string;
}

declare module "*/static/debugger.js" {
  export function debugView(cluster: import("./views").Cluster, root: HTMLElement, options: object): () => void;
}

declare module "*/static/failures.js" {
  export function failureView(cluster: import("./views").Cluster, root: HTMLElement, options: object): () => void;
}

declare module "*/static/logs.js" {
  export function logView(cluster: import("./views").Cluster, root: HTMLElement, options: object): () => void;
}
