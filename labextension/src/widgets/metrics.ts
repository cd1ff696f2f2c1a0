import { widget } from "./widget";
import { metricView } from "../views/metrics";

export default widget(metricView);
