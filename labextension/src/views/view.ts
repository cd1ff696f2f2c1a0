// What every view is: a function that shows something of a cluster in an element until its result is called.

import type { Cluster } from "../cluster/client";

export type View<Options> = (cluster: Cluster, root: HTMLElement, options: Options) => () => void;
