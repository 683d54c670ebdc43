# Writes ipw200_coefficients_R.csv from ipw200.csv. Run: Rscript make_ipw200_coefficients.R
z <- read.csv("ipw200.csv"); z$z3 <- factor(z$z3)
m <- glm(e~z1+z2+z3,data=z,family=binomial,control=glm.control(epsilon=1e-15,maxit=100))
s <- summary(m)$coefficients
ci <- exp(confint.default(m,level=0.95))  # Wald's interval, of the odds ratio
o <- data.frame(name=rownames(s),value=s[,1],standard_error=s[,2],odds_ratio=exp(s[,1]),low=ci[,1],high=ci[,2],p_value=s[,4])
write.csv(format(o,digits=17,trim=TRUE),"ipw200_coefficients_R.csv",row.names=FALSE,quote=FALSE)
