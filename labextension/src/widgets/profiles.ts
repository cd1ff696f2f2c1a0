import { widget } from "./widget";
import { profileView } from "../views/profiles";

export default widget(profileView);
