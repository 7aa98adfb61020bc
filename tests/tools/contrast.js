// Returns the texts on the screen whose contrast with their background is below 4.5 (WCAG 2.2, AA).
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255);
};
const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
const background = (node) => {
  if (!node) return [1, 1, 1];
  const own = rgba(getComputedStyle(node).backgroundColor);
  return own[3] === 1 ? own.slice(0, 3) : over(own, background(node.parentElement));
};
const luminance = (color) => {
  const [r, g, b] = color.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const low = [];
for (const node of document.querySelectorAll("main *, header *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !node.checkVisibility({ opacityProperty: true })) continue;
  const below = background(node),
    style = getComputedStyle(node);
  const text = over(rgba(node.closest("svg") ? style.fill : style.color), below);
  const [light, dark] = [luminance(text), luminance(below)].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  if (ratio < 4.5)
    low.push(`${node.tagName} ${node.className} ${node.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
}
return [...new Set(low)];
