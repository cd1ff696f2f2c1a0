import { widget } from "./widget";
import { meshView } from "../views/mesh";

export default widget(meshView);
