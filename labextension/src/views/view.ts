// A view: a function that shows a part of a cluster in an element until its result is called.

import type { Cluster } from "../cluster/client";

export type View<Options> = (cluster: Cluster, root: HTMLElement, options: Options) => () => void;
