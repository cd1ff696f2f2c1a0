import { widget } from "./widget";
import { failureView } from "../views/failures";

export default widget(failureView);
