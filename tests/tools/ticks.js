// Prints [ticks, texts] of each of the given axes: [low, high, count, whole steps].
const fs = require("fs");
const [folder, axes] = process.argv.slice(2);
const sources = ["base.js", "plot.js"].map((name) => fs.readFileSync(`${folder}/${name}`, "utf8"));
const [ticks, tickTexts] = new Function(`${sources.join("\n")}; return [ticks, tickTexts];`)();
const labels = ([low, high, count, whole]) => {
  const values = ticks(low, high, count, whole);
  return [values, tickTexts(values, whole)];
};
console.log(JSON.stringify(JSON.parse(axes).map(labels)));
